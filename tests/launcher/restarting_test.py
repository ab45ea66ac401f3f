"""Jobs that fail or are preempted, and are restarted: real processes of a toy training that resumes where it saved."""

import os
import re
import signal
import time

import pytest

from tests import jobs as processes
from tests.launcher.toy import die, launches
from tests.waiting import DEADLINE

pytestmark = [pytest.mark.processes, pytest.mark.waits]
launch = launches()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "1 / 0", "os._exit(6)"])
def test_a_job_that_fails_goes_on_where_it_saved(how: str, size: int, launch) -> None:
    one = launch("--max_restarts=2", fault=die(f"rank == {size - 1} and restart == 0 and step == 8", how), size=size)
    assert one.end() == 0
    begun = one.begun()
    assert [(rank, step, restart) for rank, step, restart, _, _ in begun] == [
        (rank, *start) for rank in range(size) for start in ((0, 0), (6, 1))
    ]
    assert len({address for *_, address in begun}) == 2  # a new group, at a new port
    assert re.search(rf"rank {size - 1} ended with code .* In 0.1 s: restart 1 of 2 after step 7\.$", one.said[-1])
    names = re.findall(r"^launched (\d{8}-\d{6}-[0-9a-f]{6})$", one.log, re.MULTILINE)
    assert len(names) == 2 and len(set(names)) == 1  # identifies the job to the program
    assert "begins at 0" in one.log and "--- restart 1, " in one.log and "begins at 6" in one.log  # nothing lost


@pytest.mark.parametrize("how", ["1 / 0", "group.first_loss(0.1); os.kill(0, signal.SIGSTOP)"])
def test_a_job_goes_on_without_a_rank_whose_loss_its_group_tolerates(how: str, launch) -> None:
    tolerate = "if rank == 0 and step == 2: group.tolerate_lost_members([1])\n            "
    one = launch("--max_restarts=2", fault=tolerate + die("rank == 1 and step == 8", how), size=3)
    assert one.end() == 0
    assert [(rank, step, restart) for rank, step, restart, _, _ in one.begun()] == [(rank, 0, 0) for rank in range(3)]
    assert sorted(re.findall(r"^\[(\d)\] done$", one.output, re.MULTILINE)) == ["0", "2"]
    assert len(one.said) == 1  # where the logs are


def test_all_save_and_start_again_with_a_rank_that_the_job_went_on_without(launch) -> None:
    tolerate = "if rank == 0 and step == 2: group.tolerate_lost_members([1])\n            "
    slow = "time.sleep(0.2)\n            "
    fault = slow + tolerate + die("rank == 1 and restart == 0 and step == 4", "1 / 0")
    one = launch("--max_restarts=1", "--rejoin_seconds=0.5", fault=fault, size=3, last=15)
    assert one.end() == 0
    begun = one.begun()
    assert sorted((rank, restart) for rank, _, restart, _, _ in begun) == [(r, n) for r in range(3) for n in range(2)]
    [step] = {step for _, step, restart, _, _ in begun if restart}
    assert 4 <= step < 15  # nothing was lost
    assert "rank 1 was lost, and the others have saved. Its log: " in one.said[-1]
    assert one.said[-1].endswith(f"In 0.1 s: restart 1 of 1 after step {step}.")


def test_a_job_outlives_what_empties_its_launchers_directory(launch) -> None:
    """As when logind removes a user's files in memory at the end of their last session."""
    empties = "import shutil; shutil.rmtree(pathlib.Path(os.environ['TFDIST_STEP_NOTE']).parents[1]); sys.exit(1)"
    one = launch("--max_restarts=2", fault=die("rank == 1 and restart < 2 and step == 8", empties))
    assert one.end() == 0
    assert sorted({restart for _, _, restart, _, _ in one.begun()}) == [0, 1, 2]
    assert "Traceback" not in one.output


@pytest.mark.parametrize("size", ["2", "1:2"])
def test_nor_is_what_a_rank_forbids_to_start_again(size: str, launch) -> None:
    """As after replica divergence, because a checkpoint may contain it."""
    forbid = "from tfdist.cluster import progress_file; progress_file.forbid_restart(); sys.exit(1)"
    one = launch("--max_restarts=2", fault=die("rank == 1 and step == 8", forbid), size=size)
    assert one.end() == 1
    assert len(one.begun()) == 2
    assert "rank 1 ended with code 1 (failed)" in one.said[-1] and "the job is not restarted" in one.said[-1]


def test_a_signal_to_one_rank_ends_all_with_75_and_who_takes_its_time_to_save_is_waited_for(launch) -> None:
    """It is not signaled, because a second signal would end it immediately."""
    says = "print(f'saved at step {step}', flush=True)"
    one = launch(last=10**6, ending=f"time.sleep(4 * rank); {says}; group.leave(75); os._exit(75)")
    os.kill(one.wait_for_ranks(2)[0], signal.SIGTERM)
    assert one.end() == 75
    saved = re.findall(r"saved at step \d+", one.output)
    assert len(saved) == 2 and len({*saved}) == 1
    assert one.output.count("Received SIGTERM") == 1  # the launcher did not signal those that were saving
    assert one.said[-1] == "tfdist launch: all ranks ended with code 75 (preempted)."


def test_a_preemption_has_its_own_budget(launch) -> None:
    one = launch("--max_preemptions=1", last=200)
    os.kill(one.wait_for_ranks(2)[0], signal.SIGTERM)
    one.wait_for_ranks(4)
    assert one.end() == 0
    step = int(re.findall(r"preempted at step (\d+)", one.output)[0])
    assert {(step, restart) for _, step, restart, _, _ in one.begun()} == {(0, 0), (step, 1)}
    assert one.said[-1].endswith("In 0.1 s: restart 1 of 1 after preemptions.")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_is_final(number: signal.Signals, launch) -> None:
    one = launch("--max_preemptions=5", "--max_restarts=5", last=10**6)
    one.wait_for_ranks(2)
    one.job.processes[0].send_signal(number)
    assert one.end() == 75
    assert len(one.begun()) == 2 and (one.directory / "saved").exists()
    assert len(one.said) == 2 and one.said[1] == "tfdist launch: all ranks ended with code 75 (preempted)."


def test_a_signal_ends_the_pause(launch) -> None:
    one = launch("--max_restarts=2", "--restart_backoff_seconds=50", fault=die("step == 4"))
    one.job.wait_for(0, "In 50 s: restart 1 of 2", DEADLINE)
    began = time.monotonic()
    one.job.processes[0].send_signal(signal.SIGTERM)
    assert one.end() == 143
    assert time.monotonic() - began < 40.0 and one.said[-1] == "tfdist launch: ended by SIGTERM."


@pytest.mark.parametrize("signaled", ["launcher", "rank"])
@pytest.mark.parametrize("node", [0, 1])
def test_on_several_hosts_all_launchers_end_with_75(node: int, signaled: str, launch) -> None:
    [address] = processes.free_addresses(1)
    flags = ("--nodes=2", f"--coordinator={address}")
    nodes = [launch(*flags, f"--node_rank={i}", last=10**6, size=1, ending="time.sleep(4 * rank)") for i in range(2)]
    pids = [one.wait_for_ranks(1)[0] for one in nodes]
    os.kill(pids[node] if signaled == "rank" else nodes[node].job.processes[0].pid, signal.SIGTERM)
    assert [one.end() for one in nodes] == [75, 75]


@pytest.mark.parametrize("node", [0, 1])
def test_output_that_nobody_reads_leaves_the_ranks_of_other_hosts_the_time_to_save(node: int, launch) -> None:
    """As for a launcher whose ssh session has ended; here, the reader of the output ends after six lines."""
    [address] = processes.free_addresses(1)
    flags = ("--nodes=2", f"--coordinator={address}")
    saving = f"time.sleep(4 * (rank != {node}))"  # longer than after a failure
    words = {"last": 10**6, "size": 1, "fault": "print('goes on', flush=True)", "ending": saving}
    launch(*flags, f"--node_rank={node}", through=("sh", "-c", '"$0" "$@" 2>&1 | head -n 6'), **words)
    other = launch(*flags, f"--node_rank={1 - node}", **words)
    assert other.end() == 75
    assert "Received SIGTERM" not in other.output
