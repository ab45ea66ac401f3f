"""CSV files of schedules: read as written, as torch.distributed.pipelining writes them, and refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, named_schedules
from tfdist.errors import InputError
from tfdist.pipelining.schedule import Action
from tfdist.pipelining.schedule_catalog import make_schedule, parse_csv
from tfdist.pipelining.schedule_simulation import check_schedule

ONE_F_ONE_B = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,,1B1,\n"


@given(named_schedules() | any_schedules())
def test_read_as_written(schedule):
    text = "\n".join(",".join(map(str, row)) for row in schedule.actions)
    found = check_schedule(parse_csv(schedule.processes, schedule.micro_batches, text, "x.csv"))
    assert (found.actions, found.stages) == (schedule.actions, schedule.stages)


@pytest.mark.parametrize(
    "text",
    [
        ONE_F_ONE_B,
        ONE_F_ONE_B.replace("\n", "\r\n") + "\n",
        "0F0, 0F1 ,0B0,0B1\n1F0,1B0,1F1,1B1",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1RESHARD\n",
    ],
    ids=["with idle cells", "other line ends", "with spaces", "with cells of communication"],
)
def test_files_of_torch(text, tmp_path):
    (tmp_path / "schedule.csv").write_bytes(text.encode())
    found = make_schedule(f"csv:{tmp_path}/schedule.csv", processes=2, micro_batches=2)
    assert found.actions == make_schedule("1f1b", processes=2, micro_batches=2).actions
    assert found.name == f"csv:{tmp_path}/schedule.csv"


def test_a_stage_may_have_whole_backward_passes_and_others_in_parts():
    found = check_schedule(parse_csv(1, 2, "0F0,0F1,0B0,0I1,0W1", "x.csv"))
    assert found.actions[0][2:4] == (Action("B", 0, 0), Action("I", 0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv must have a line of actions for each process. Received: none."),
        (",,\n\n", "x.csv must have a line of actions for each process. Received: none."),
        (
            "0F0,0X0",
            "x.csv, line 1: a cell must be stage, F, B, I or W, and micro-batch, such as 0F0, or empty. Received: 0X0.",
        ),
        ("0F0\n(1F1;1B0)OVERLAP_F_B", "x.csv, line 2: a cell must be"),
        ("0F0,0B0,0F1,0B1", "must have actions for 2 processes, the stages of the mesh. Received: 1."),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0", "must have actions for 2 processes"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0", "must have a number of stages that is divisible by the 2 processes. Received: 3."),
        (
            "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0",
            "stage 3 in process 1, as stage v is in process v % 2. Received: 3F0 in process 0",
        ),
        (ONE_F_ONE_B.replace("0B1", "0B2"), "must have micro-batches 0 to 1 of stages 0 to 1. Received: 0B2."),
        (ONE_F_ONE_B.replace("0B1", "0B0"), "must compute each action once. Received: 0B0 2 times."),
        (ONE_F_ONE_B.replace("0B1", ""), "F, and either B or both I and W, of micro-batch 1 in stage 0. Received: F."),
        (ONE_F_ONE_B.replace("0B1", "0I1"), "of micro-batch 1 in stage 0. Received: F I."),
        (ONE_F_ONE_B.replace("0B1", "0B1,0W1"), "of micro-batch 1 in stage 0. Received: B F W."),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "process 0 waits before 0B0 for 1I0 of process 1, process 1 waits before 1F1 for 0F1 of process 0.",
        ),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(InputError) as error:
        check_schedule(parse_csv(2, 2, text, "x.csv"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_large_number_of_a_stage_takes_no_time():
    with pytest.raises(InputError, match="of micro-batch 1 in stage 0. Received: none."):
        check_schedule(parse_csv(1, 10**6, "0F0,0B0,999999F0", "x.csv"))


@pytest.mark.fuzz
@given(st.text(st.sampled_from('0123FBIW,\n ()\u0663SEND_\x00"') | st.characters(), max_size=60))
def test_any_text_is_a_schedule_or_refused_in_one_line(text):
    try:
        schedule = check_schedule(parse_csv(1, 1, text, "x.csv"))
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert schedule.actions[0][0] == Action("F", 0, 0)


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\xff\xfe\x00", "it is not text")])
def test_files_that_cannot_be_read(tmp_path, content, reason):
    file = tmp_path / "schedule.csv"
    if content:
        file.write_bytes(content)
    with pytest.raises(InputError, match=f"csv:FILE must name a file with a schedule.*Received: {file}: {reason}"):
        make_schedule(f"csv:{file}", 2, 2)
