"""Jobs that fail, are preempted, and are started again: real processes of a toy training that resumes where it saved."""

import contextlib
import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tfdist.testing import processes

DEADLINE = 30.0
# Ten updates or more, one a call; each needs all ranks. It saves every three, and when all agree to end.
PROGRAM = """
import os, pathlib, signal, sys, time
from tfdist.cluster import from_tf_config
from tfdist.errors import Preempted
from tfdist.group import join, watch
from tfdist.meetings import Meetings
from tfdist.preemption import notices
from tfdist.step_note import StepNote

saved, restart = pathlib.Path(sys.argv[1]), int(os.environ["TFDIST_RESTART"])
cluster = from_tf_config(os.environ)
rank = cluster.rank
group, progress = join(cluster), StepNote()

def save(step):
    if rank == 0:
        saved.write_text(str(step))
    group.barrier("saved")

def train(first, last):
    progress.note(first)
    with Meetings(group) as meetings, notices(lambda name: meetings.wish("preempt")):
        print(f"begins at {{first}} restart {{restart}} pid {{os.getpid()}} group {{os.environ['TFDIST_GROUP']}}", flush=True)
        for step in range(first + 1, last + 1):
            meetings.begin(step)
            time.sleep(0.02)
            {fault}
            group.barrier("update")
            progress.note(step)
            due = meetings.reached(step)
            if "preempt" in due or step % 3 == 0:
                save(step)
            if "preempt" in due:
                {ending}
                raise Preempted(f"preempted at step {{step}}")

with watch(group, cluster, grace=1.0):
    first = int(saved.read_text()) if saved.exists() else 0
    try:
        train(first, {last})
        print("done", flush=True)
        group.barrier("end")
    except Preempted as error:
        group.barrier("end")
        print(error, flush=True)
        group.leave(75, str(error))
        os._exit(75)
"""


class Launched:
    def __init__(self, job: processes.Job, directory: pathlib.Path):
        self.job, self.directory = job, directory

    def begun(self) -> list[tuple[int, int, int, int, str]]:
        """Each start of a rank: rank, step, restart, pid, the group's address."""
        found = re.findall(r"^\[(\d)\] begins at (\d+) restart (\d+) pid (\d+) group (\S+)", self.output, re.MULTILINE)
        return sorted((int(r), int(s), int(k), int(p), a) for r, s, k, p, a in found)

    def wait_for_ranks(self, count: int) -> list[int]:
        """Waits for so many starts; returns the process numbers of the newest attempt, by rank."""
        end = time.monotonic() + DEADLINE
        while len(self.begun()) < count and time.monotonic() < end:
            time.sleep(0.01)
        newest = max(restart for _, _, restart, _, _ in self.begun())
        return [pid for _, _, restart, pid, _ in self.begun() if restart == newest]

    @property
    def output(self) -> str:
        return self.job.output(0)

    @property
    def said(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("tfdist.launch: ")]

    @property
    def log(self) -> str:
        return (self.directory / "logs" / "rank-0.log").read_text()

    def end(self) -> int:
        [ended] = self.job.wait(DEADLINE)
        print(ended.output)  # pytest shows it when the test fails
        return ended.code


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Callable[..., Launched]]:
    with contextlib.ExitStack() as stack:

        def create(*flags: str, fault: str = "pass", last: int = 10, size: int = 2, ending: str = "pass") -> Launched:
            program = PROGRAM.format(fault=fault, last=last, ending=ending)
            where = (f"--processes={size}", f"--log_dir={tmp_path / 'logs'}", "--restart_backoff_seconds=0.1")
            command = [sys.executable, "-m", "tfdist.launch", *where, *flags, "--", sys.executable, "-c", program]
            job = stack.enter_context(processes.job([*command, str(tmp_path / "saved")], 1))
            return Launched(job, tmp_path)

        yield create


def die(when: str, how: str = "os.kill(os.getpid(), signal.SIGKILL)") -> str:
    return f"if {when}: {how}"


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
    assert "begins at 0" in one.log and "--- restart 1, " in one.log and "begins at 6" in one.log  # nothing is lost


def test_a_failure_that_repeats_at_the_same_step_ends_the_job_and_says_so(launch) -> None:
    one = launch("--max_restarts=5", fault=die("rank == 1 and step == 8"))
    assert one.end() == 137
    assert len(one.begun()) == 4
    assert "rank 1 ended with code 137 (killed by SIGKILL); the second failure in a row after step 7" in one.said[-1]


def test_failures_at_other_steps_are_tried_until_the_budget_is_used_up(launch) -> None:
    one = launch("--max_restarts=2", fault=die("rank == 1 and step == 7 + restart", "sys.exit(1)"))
    assert one.end() == 1
    assert len(one.begun()) == 6
    assert "rank 1 ended with code 1 (failed)" in one.said[-1] and "--max_restarts=2 is used up" in one.said[-1]


@pytest.mark.parametrize("code", [2, 3])
def test_what_would_come_again_is_not_tried_again(code: int, launch) -> None:
    one = launch("--max_restarts=2", fault=die("rank == 1 and step == 8", f"group.leave({code}); sys.exit({code})"))
    assert one.end() == code
    assert len(one.begun()) == 2 and "restart" not in one.said[-1]


def test_a_signal_to_one_rank_ends_all_with_75(launch) -> None:
    one = launch(last=10**6)
    os.kill(one.wait_for_ranks(2)[1], signal.SIGTERM)
    assert one.end() == 75
    assert len(set(re.findall(r"preempted at step \d+", one.output))) == 1
    assert one.said[-1] == "tfdist.launch: all ranks ended with code 75 (preempted)."
    assert one.output.count("Received SIGTERM") == 1  # the launcher did not signal those that were saving


def test_who_takes_its_time_to_save_is_waited_for(launch) -> None:
    """And is not signalled: that would be a second signal, which ends at once."""
    one = launch(last=10**6, ending="time.sleep(4 * rank); group.leave(75); os._exit(75)")
    os.kill(one.wait_for_ranks(2)[0], signal.SIGTERM)
    assert one.end() == 75
    assert one.output.count("Received SIGTERM") == 1 and "all ranks ended with code 75" in one.said[-1]


def test_a_preemption_has_its_own_budget(launch) -> None:
    one = launch("--max_preemptions=1", last=200)
    os.kill(one.wait_for_ranks(2)[0], signal.SIGTERM)
    one.wait_for_ranks(4)
    assert one.end() == 0
    step = int(re.findall(r"preempted at step (\d+)", one.output)[0])
    assert {(step, restart) for _, step, restart, _, _ in one.begun()} == {(0, 0), (step, 1)}
    assert one.said[-1].endswith("In 0.1 s: restart 1 of 1 after preemptions.")


def test_a_second_preemption_is_beyond_the_budget(launch) -> None:
    one = launch("--max_preemptions=1", "--max_restarts=5", last=10**6)
    for count in (2, 4):
        os.kill(one.wait_for_ranks(count)[0], signal.SIGTERM)
    assert one.end() == 75
    assert one.said[-1] == "tfdist.launch: all ranks ended with code 75 (preempted); --max_preemptions=1 is used up."


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_is_final(number: signal.Signals, launch) -> None:
    one = launch("--max_preemptions=5", "--max_restarts=5", last=10**6)
    one.wait_for_ranks(2)
    one.job.processes[0].send_signal(number)
    assert one.end() == 75
    assert len(one.begun()) == 2 and (one.directory / "saved").exists()
    assert len(one.said) == 2 and one.said[1] == "tfdist.launch: all ranks ended with code 75 (preempted)."


def test_a_signal_ends_the_pause(launch) -> None:
    one = launch("--max_restarts=2", "--restart_backoff_seconds=50", fault=die("step == 4"))
    one.job.wait_for(0, "In 50 s: restart 1 of 2", DEADLINE)
    began = time.monotonic()
    one.job.processes[0].send_signal(signal.SIGTERM)
    assert one.end() == 143
    assert time.monotonic() - began < 5.0 and one.said[-1] == "tfdist.launch: ended by SIGTERM."


def test_the_grace_is_the_flags(launch) -> None:
    one = launch("--grace_seconds=1", last=10**6, ending="time.sleep(1000)")
    one.wait_for_ranks(2)
    began = time.monotonic()
    one.job.processes[0].send_signal(signal.SIGTERM)
    assert one.end() == 143
    assert 1.0 < time.monotonic() - began < 8.0


@pytest.mark.parametrize("signalled", ["launcher", "rank"])
@pytest.mark.parametrize("node", [0, 1])
def test_on_several_hosts_all_launchers_end_with_75(node: int, signalled: str, launch) -> None:
    [address] = processes.free_addresses(1)
    flags = ("--nodes=2", f"--coordinator={address}")
    nodes = [launch(*flags, f"--node_rank={i}", last=10**6, size=1, ending="time.sleep(4 * rank)") for i in range(2)]
    pids = [one.wait_for_ranks(1)[0] for one in nodes]
    os.kill(pids[node] if signalled == "rank" else nodes[node].job.processes[0].pid, signal.SIGTERM)
    assert [one.end() for one in nodes] == [75, 75]
