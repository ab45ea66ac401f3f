"""Elastic jobs: real launchers and processes of a toy training that resumes where it saved.

These correspond to Horovod's integration tests of its elastic driver (`test/integration/elastic_common.py`):

    hosts added and removed   test_hosts_that_are_added_and_removed_resize_the_job
    one rank fails            tests/end_to_end/elastic/run_test.py
    too few hosts, timeout    test_a_job_that_never_has_its_least_processes_gives_up

Its others concern decisions, which job_controller_test.py and slots_test.py test with a simulated clock: one rank fails without
scaling, all ranks fail, all hosts are blacklisted, the limit of resets, the pause of a blacklisted host.
"""

import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests import jobs as processes
from tests.launcher.launching import Launches, python
from tests.launcher.toy import Launched, die, launches
from tests.waiting import DEADLINE, wait_for
from tfdist.cluster.signals import TOGETHER_SECONDS

pytestmark = [pytest.mark.processes, pytest.mark.waits]
launch = launches("--rejoin_seconds=inf", size="2:3")

FOREVER = 10**6


def sizes(one: Launched) -> list[int]:
    """Returns the number of ranks in each attempt, from the launcher's output."""
    first = re.findall(r"^tfdist launch: ranks? .* of (\d+), logs in", one.output, re.MULTILINE)
    return [int(size) for size in first + re.findall(r"Attempt \d+: (\d+) processes\.", one.output)]


def listed(path: pathlib.Path, *lines: str) -> str:
    """Writes a host list atomically; returns the flag."""
    (path / "new").write_text("\n".join(lines))
    (path / "new").replace(path / "hosts")
    return f"--hosts={path / 'hosts'}"


def wait(condition: Callable[[], object], *launchers: Launched) -> None:
    try:
        wait_for(condition)
    except AssertionError:
        raise AssertionError("\n---\n".join(one.output for one in launchers)) from None


def test_hosts_that_are_added_and_removed_resize_the_job(launch, tmp_path) -> None:
    one = launch(listed(tmp_path, "localhost:1", "127.0.0.2:1"), last="10 if restart == 3 else 10**6", size="1:3")
    for count, lines in ((2, ["localhost:3"]), (5, ["localhost:1"]), (6, ["localhost:1", "127.0.0.1:1"])):
        one.wait_for_ranks(count)
        wait(lambda: (tmp_path / "saved").exists())  # an update has been saved
        listed(tmp_path, *lines)
    assert one.end() == 0
    assert sizes(one) == [2, 3, 1, 2]
    stopped = [int(step) for step in re.findall(r"\[0\] preempted at step (\d+)", one.output)]
    begun = sorted({(restart, step) for _, step, restart, _, _ in one.begun()})
    assert begun == list(enumerate([0, *stopped]))  # no update is lost if no process dies


# Each rank saves until the test has let it.
SAVING = (
    "print('saves', flush=True); [time.sleep(0.02) for _ in iter((saved.parent / 'go').exists, True)]; "
    "print('has saved', flush=True)"
)


def signal_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("before, after", [("list", "list"), ("list", "ranks"), ("ranks", "list"), ("rank", "list")])
def test_a_resize_cuts_no_save_short(before: str, after: str, launch, tmp_path) -> None:
    """Neither a second one, nor one in addition to the signals of a scheduler, whose hosts change when it preempts some."""
    one = launch(listed(tmp_path, "localhost:2"), last="10 if restart else 10**6", size="1:3", ending=SAVING)
    pids, sizes = one.wait_for_ranks(2), iter((3, 1))
    for change in (before, after):
        if change == "list":
            listed(tmp_path, f"localhost:{next(sizes)}")
        else:
            signal_all(pids if change == "ranks" else pids[:1])
        one.job.wait_for(0, "[0] saves", DEADLINE)
        time.sleep(TOGETHER_SECONDS + 0.2)
    time.sleep(2.0)  # the launcher has seen the second change
    (tmp_path / "go").touch()
    assert one.end() == 0
    assert one.output.count("has saved") == 2
    assert len({restart for _, _, restart, _, _ in one.begun()}) == 2


@pytest.mark.parametrize("times, code", [(1, 75), (2, 143)])
def test_only_the_users_second_signal_to_the_launcher_cuts_a_save_short(
    times: int, code: int, launch, tmp_path
) -> None:
    one = launch(listed(tmp_path, "localhost:2"), last=FOREVER, size="1:3", ending=SAVING)
    one.wait_for_ranks(2)
    listed(tmp_path, "localhost:3")
    one.job.wait_for(0, "[0] saves", DEADLINE)
    for _ in range(times):
        one.job.processes[0].send_signal(signal.SIGTERM)
        time.sleep(TOGETHER_SECONDS + 0.2)
    if times == 1:
        time.sleep(2.0)  # longer than after a failure
        (tmp_path / "go").touch()
    assert one.end() == code
    assert one.output.count("has saved") == (2 if times == 1 else 0)


def test_a_resize_waits_for_ranks_that_are_ending_after_another_one_without_a_signal(tmp_path) -> None:
    """The signal would end a program without a handler, or one that has left it, although it was about to end by itself."""
    hosts = listed(tmp_path, "localhost:2")
    body = "if int(os.environ['TFDIST_RESTART']): sys.exit()\nif rank: time.sleep(3)\nprint('ends', flush=True); sys.exit(75)"
    with Launches(tmp_path) as launches:
        one = launches(*python(body), flags=("--processes=1:3", hosts))
        assert one.read_line() == "[0] ends\n"
        listed(tmp_path, "localhost:3")
        assert one.wait() == 0
    assert "[1] ends" in one.out and "Attempt 1: 3 processes." in one.err


def test_the_others_go_on_without_one_that_is_silent(launch) -> None:
    """A suspended or hanging process does not end; another rank reports a suspicion, so that it is detected within seconds."""
    when = "restart == 0 and step == 8 and rank"
    one = launch(
        fault=f"if {when} == 0: group.first_loss(60)\n            {die(f'{when} == 1', 'os.kill(0, signal.SIGSTOP)')}"
    )
    assert one.end() == 0
    assert sizes(one) == [3, 2]
    assert "rank 1 is lost: no heartbeat for 3 s" in one.said[1]


def test_the_others_go_on_without_all_that_do_not_come(launch) -> None:
    hang = die("rank and restart == 0", "time.sleep(1000)")
    one = launch("--start_timeout_seconds=1", start=hang, size="1:3")
    assert one.end() == 0
    assert sizes(one) == [3, 1]
    assert "ranks 1, 2 did not join the job's group within 1 s" in one.said[1]


def test_a_job_that_never_has_its_least_processes_gives_up(launch, tmp_path) -> None:
    one = launch(listed(tmp_path, "localhost:1", "elsewhere:4"), "--elastic_timeout_seconds=1")
    assert one.end() == 5
    assert one.begun() == []
    assert one.said == [
        "tfdist launch: Waiting for processes: 1 can run, at least 2 are needed; giving up in 1 s.",
        "tfdist launch: fewer than 2 processes could run for 1 s (--elastic_timeout_seconds).",
    ]


class TwoHosts:
    """Two launchers of one job: the first runs two ranks, the second joins later and runs the third."""

    def __init__(self, launch, tmp_path: pathlib.Path, **options):
        [address] = processes.free_addresses(1)
        flags = (listed(tmp_path, "localhost:2"), f"--coordinator={address}", "--start_timeout_seconds=60")
        self.first = launch(*flags, **options)
        self.first.job.wait_for(0, "ranks 0, 1 of 2", DEADLINE)
        self.second = launch(*flags, **options)
        self.first.job.wait_for(0, "launcher 1 (127.0.0.1) has joined", DEADLINE)
        listed(tmp_path, "localhost:2", "127.0.0.1:1")
        wait(lambda: self.ranks(1) == [0, 1, 2], self.first, self.second)

    def begun(self) -> list[tuple[int, int, int]]:
        """Returns restart, rank and step of each start of a rank."""
        both = self.first.begun() + self.second.begun()
        return sorted((restart, rank, step) for rank, step, restart, _, _ in both)

    def ranks(self, restart: int) -> list[int]:
        return [rank for number, rank, _ in self.begun() if number == restart]


def test_a_launcher_that_comes_joins_and_one_that_is_asked_to_end_leaves(launch, tmp_path) -> None:
    two = TwoHosts(launch, tmp_path, last="10**6 if restart < 2 else 10")
    assert [rank for rank, *_ in two.second.begun()] == [2]
    two.second.job.processes[0].send_signal(signal.SIGTERM)
    assert (two.second.end(), two.first.end()) == (75, 0)
    assert two.ranks(2) == [0, 1, 2] and len(two.second.begun()) == 1  # same host: the slots are now the first one's
    assert "has left the job" in two.first.output


STOPPED = "no heartbeat for 10 s (it is stopped, or its host is unreachable)."


@pytest.mark.parametrize("number, why", [(signal.SIGKILL, ""), (signal.SIGSTOP, STOPPED)])
def test_the_end_of_the_coordinators_launcher_ends_the_others(number, why, launch, tmp_path) -> None:
    two = TwoHosts(launch, tmp_path, last=FOREVER)
    two.first.job.processes[0].send_signal(number)
    assert two.second.end() == 5
    assert two.second.said[-1].startswith(f"tfdist launch: the coordinator's launcher is lost: {why}")


@pytest.mark.parametrize(("size", "expected"), [("1:1", "1"), ("1", "")])
def test_processes_know_whether_their_job_is_elastic(tmp_path: pathlib.Path, size: str, expected: str) -> None:
    command = (f"--processes={size}", f"--log_dir={tmp_path}", "--", "sh", "-c", "echo elastic: $TFDIST_ELASTIC.")
    with processes.job([sys.executable, "-m", "tfdist.launch", *command], 1, {"TFDIST_ELASTIC": "1"}) as job:
        [end] = job.wait(DEADLINE)
    assert f"elastic: {expected}.\n" in end.output, end.output
