"""The named schedules: the orders of the papers, length and memory by closed forms, sums in one order, and messages."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, computes_a_batch, named_schedules
from tfdist.errors import InputError
from tfdist.pipelining.schedule import Action
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.timeline import simulate

SIZES = st.tuples(st.integers(1, 7), st.integers(1, 15))
SECONDS = st.integers(1, 9)


def rows(spec, processes, micro_batches):
    return [" ".join(map(str, row)) for row in make_schedule(spec, processes, micro_batches).actions]


def test_gpipe():
    assert rows("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_one_f_one_b():
    """Figure 4, top, of arXiv:2104.04473."""
    assert rows("1f1b", 4, 8) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7",
    ]


def test_interleaved():
    """The order of PyTorch 2.13's ScheduleInterleaved1F1B: the first and the last of four processes."""
    found = rows("interleaved(chunks=2)", 4, 8)
    assert found[0] == (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1"
        " 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7"
    )
    assert found[3].startswith("3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1")


def test_zb_h1():
    """The order of PyTorch 2.13's ScheduleInterleavedZeroBubble with one stage in each process."""
    found = rows("zb_h1", 4, 8)
    assert found[0].startswith("0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1")
    assert found[3].startswith("3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1")
    assert found[3].endswith("3F7 3I7 3W4 3W5 3W6 3W7")


@given(SIZES, SECONDS, SECONDS)
def test_gpipe_and_1f1b_take_as_long(sizes, forward, backward):
    processes, micro_batches = sizes
    for spec, live in (("gpipe", lambda s: micro_batches), ("1f1b", lambda s: min(processes - s, micro_batches))):
        schedule = make_schedule(spec, processes, micro_batches)
        timeline = simulate(schedule, forward=forward, backward=backward)
        assert timeline.makespan == (micro_batches + processes - 1) * (forward + backward), spec
        assert timeline.bubble == pytest.approx((processes - 1) / (micro_batches + processes - 1)), spec
        assert schedule.live_activations() == tuple(map(live, range(processes))), spec


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4), SECONDS, SECONDS)
def test_interleaved_divides_the_bubble_by_its_chunks(processes, rounds, chunks, forward, backward):
    micro_batches = rounds * processes
    schedule = make_schedule(f"interleaved(chunks={chunks})", processes, micro_batches)
    timeline = simulate(schedule, forward=forward, backward=backward)  # of a chunk
    ideal = micro_batches * chunks * (forward + backward)
    assert timeline.makespan == ideal + (processes - 1) * (forward + backward)
    assert timeline.bubble / (1 - timeline.bubble) == pytest.approx((processes - 1) / (chunks * micro_batches))
    most = [2 * (processes - 1 - s) + (chunks - 1) * processes + 1 for s in range(processes)]
    assert schedule.live_activations() == tuple(min(count, micro_batches * chunks) for count in most)


@given(st.integers(1, 6), st.integers(0, 9), SECONDS, SECONDS, SECONDS)
def test_zb_h1_leaves_a_part_of_the_bubble_and_needs_the_memory_of_1f1b(processes, more, forward, inputs, weights):
    weights = min(weights, forward, inputs)
    micro_batches = processes + more
    schedule = make_schedule("zb_h1", processes, micro_batches)
    timeline = simulate(schedule, forward=forward, backward=inputs + weights, weight=weights)
    busy, idle = micro_batches * (forward + inputs + weights), (processes - 1) * (forward + inputs - weights)
    assert timeline.makespan == busy + idle
    assert max(schedule.live_activations()) == processes


@given(st.integers(1, 8), st.integers(1, 8))
def test_zb_h1_with_few_micro_batches(processes, micro_batches):
    schedule = make_schedule("zb_h1", processes, micro_batches)
    zero_bubble, whole = (
        simulate(each, forward=1, backward=2).makespan
        for each in (schedule, make_schedule("1f1b", processes, micro_batches))
    )
    assert zero_bubble <= whole
    assert max(schedule.live_activations()) == min(processes, micro_batches)


@given(named_schedules())
def test_gradients_are_summed_in_one_order(schedule):
    assert computes_a_batch(schedule)
    for stage in range(schedule.stages):
        row = schedule.actions[schedule.process_of(stage)]
        for kind in "FBIW":
            order = [action.micro_batch for action in row if (action.kind, action.stage) == (kind, stage)]
            assert order in ([], list(range(schedule.micro_batches)))


@pytest.mark.parametrize(
    ("spec", "processes", "micro_batches", "message"),
    [
        ("interleaved", 4, 6, "divisible by the 4 stages of the mesh. Received: 6. Use 4 or 8, or the schedule 1f1b."),
        ("interleaved", 4, 3, "Received: 3. Use 4, or the schedule 1f1b."),
        ("gpipe", 2, 0, "micro_batches must be an integer of at least 1. Received: 0."),
        ("gpipe", 2.0, 4, "processes must be an integer of at least 1. Received: 2.0."),
        ("gpip", 2, 4, 'Did you mean "gpipe"?'),
    ],
)
def test_what_is_refused(spec, processes, micro_batches, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        make_schedule(spec, processes, micro_batches)
    assert "\n" not in str(error.value)


def test_schedules_import_neither_tensorflow_nor_matplotlib():
    code = (
        "import sys\nfrom tfdist.pipelining import schedule_catalog, timeline\n"
        "schedule_catalog.make_schedule('zb_h1', 4, 8)\n"
        "print(sorted({'tensorflow', 'keras', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"


@given(named_schedules() | any_schedules())
def test_each_message_is_sent_and_received_once(schedule):
    actions = [(process, action) for process, row in enumerate(schedule.actions) for action in row]
    sent = [(process, *m) for process, action in actions if (m := schedule.message(action, is_sent=True))]
    received = [(m[0], process, m[1]) for process, action in actions if (m := schedule.message(action, is_sent=False))]
    assert sorted(sent) == sorted(received), "source, target and tag"
    assert len({*sent}) == len(sent), "tags are unique"


def test_the_first_and_the_last_stage_have_one_neighbor():
    interleaved = make_schedule("interleaved(chunks=2)", processes=2, micro_batches=2)
    assert interleaved.message(Action("F", 0, 0), is_sent=False) is None
    assert interleaved.message(Action("B", 3, 0), is_sent=False) is None
    assert interleaved.message(Action("F", 1, 0), is_sent=True) == (0, "1F0"), "from the last process to the first"
    parts = make_schedule("zb_h1", processes=2, micro_batches=1)
    assert {parts.message(Action("W", 1, 0), is_sent=sends) for sends in (True, False)} == {None}
    assert parts.message(Action("I", 1, 0), is_sent=True) == (0, "1B0")
