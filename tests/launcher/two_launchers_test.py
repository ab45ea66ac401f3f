"""Independent jobs of one user on one host at the same time, with default options, do not disturb each other."""

import re

import pytest

from tests.launcher.launching import Launch, Launches, member
from tests.waiting import wait_for
from tfdist.launcher.orders import new_job_name

pytestmark = [pytest.mark.processes, pytest.mark.waits]

# Runs until a file exists; its group must have members of its own job only.
JOB = """
    assert len(set(group.gather("job", os.environ["JOB"]))) == 1
    print("runs", os.environ["TFDIST_LAUNCHED"], os.environ["TFDIST_COMMITS"], flush=True)
    while not os.path.exists("end"): time.sleep(0.02)
    group.barrier("end")
"""


def started(launch: Launches, *flags: str) -> tuple[list[Launch], list[str]]:
    """Returns three launchers that were started at once, and what each rank has printed."""
    jobs = [launch(*member(JOB.strip()), flags=flags, JOB=str(number)) for number in range(3)]
    return jobs, [one.read_line() for one in jobs for _ in range(2)]


@pytest.mark.parametrize("flags", [(), ("--processes=1:2",), ("--log_dir=logs",)])
def test_launchers_that_start_at_once_share_nothing(flags, launch, tmp_path) -> None:
    jobs, lines = started(launch, *flags)
    for column in (2, 3):  # the name of the job's output, and the directory of its commits
        assert len({line.split()[column] for line in lines}) == 3
    (tmp_path / "end").touch()
    assert [one.wait() for one in jobs] == [0, 0, 0]
    logs = {re.search(r"logs in (\S+)", one.err)[1] for one in jobs}
    assert len(logs) == (1 if "--log_dir=logs" in flags else 3)


def test_the_end_of_one_does_not_concern_the_others(launch, tmp_path) -> None:
    jobs, _ = started(launch)
    jobs[0].process.kill()
    jobs[1].process.terminate()
    assert jobs[1].wait() == 143
    wait_for(lambda: len(launch.running()) <= 4)  # the third launcher, its guard and its two ranks
    assert len(launch.running()) == 4
    (tmp_path / "end").touch()
    assert jobs[2].wait() == 0


def test_jobs_that_begin_in_the_same_second_have_different_names() -> None:
    assert len({new_job_name() for _ in range(5)}) == 5
