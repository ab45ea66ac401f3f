"""The processes of a job are ended when they have more memory than the limit."""

import os
import sys

import psutil
import pytest

from tfdist.errors import ExitCode
from tfdist.launcher import job_runner
from tfdist.launcher.job import Job
from tfdist.planning.trials import MemoryLimit, available_bytes, resident_bytes

pytestmark = pytest.mark.processes

MIB = 2**20
# Grows by 20 MiB every 50 ms, in a process of its own, up to 400 MiB.
GROW = "import time\nkept = []\nfor _ in range(20):\n    kept.append(b'x' * (20 << 20)); time.sleep(0.05)"
STAY = "\ntime.sleep(600)"  # until it is ended
IN_CHILD = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {GROW + STAY!r}]).returncode)"


def run(code, limit, tmp_path, processes=1):
    watched = MemoryLimit(limit)
    before = {*psutil.Process().children(recursive=True)}  # of tests before in this process
    outcome = job_runner.run(
        Job(processes=processes, log_dir=str(tmp_path / "logs"), grace_seconds=1),
        lambda rank: [sys.executable, "-c", code],
        os.environ,
        stops=[watched],
    )
    assert not {*psutil.Process().children(recursive=True)} - before
    return outcome, watched


@pytest.mark.parametrize(
    ("code", "processes"),
    [
        pytest.param(GROW + STAY, 1, marks=pytest.mark.full),
        (IN_CHILD, 1),
        pytest.param(GROW + STAY, 2, marks=pytest.mark.full),
    ],
)
def test_a_job_that_exceeds_the_limit_is_ended(code, processes, tmp_path):
    outcome, watched = run(code, 200 * MIB, tmp_path, processes)
    assert watched.exceeded and outcome.code == ExitCode.OUT_OF_MEMORY
    assert outcome.reason == "more than 200.0 MiB"
    assert watched.peak > 200 * MIB


@pytest.mark.full
def test_a_job_within_the_limit_is_left_alone(tmp_path):
    outcome, watched = run(GROW, 600 * MIB, tmp_path)
    assert outcome.code == ExitCode.DONE and not watched.exceeded
    assert 300 * MIB < watched.peak < 600 * MIB


def test_memory_of_processes():
    own = resident_bytes([os.getpid()])
    assert 0 < own <= psutil.Process().memory_info().rss + MIB
    assert resident_bytes([2**30]) == 0, "has ended"
    assert 0 < available_bytes() < psutil.virtual_memory().total
