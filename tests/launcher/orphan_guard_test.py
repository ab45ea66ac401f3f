import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.launcher.launching import Launches, ends, members
from tests.waiting import DEADLINE, read_line, wait_for
from tfdist.launcher import reaper
from tfdist.launcher.orphan_guard import OrphanGuard

pytestmark = [pytest.mark.processes, pytest.mark.waits]

SLEEPERS = ["sh", "-c", "sleep 1000 & sleep 1000 & wait"]
GUARDING = """
import subprocess, sys, time
from tfdist.launcher.orphan_guard import OrphanGuard
with OrphanGuard() as guard:
    guard.add_directory(sys.argv[1])
    child = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & wait"], start_new_session=True)
    guard.add(child.pid)
    print(child.pid, guard._process.pid, flush=True)
    time.sleep(1000)
"""


def test_a_launcher_that_is_killed_leaves_nobody_and_nothing_in_memory(tmp_path):
    memory = tmp_path / "memory"
    (memory / "commits").mkdir(parents=True)
    launcher = subprocess.Popen([sys.executable, "-c", GUARDING, str(memory)], stdout=subprocess.PIPE, text=True)
    group, guard = map(int, read_line(launcher.stdout).split())
    os.kill(guard, signal.SIGTERM)  # as when all processes of a user are ended
    try:
        wait_for(lambda: len(members(group)) == 3)
        launcher.kill()
        wait_for(lambda: not members(group))
        wait_for(lambda: not memory.exists())
        assert ends(guard)
    finally:
        launcher.kill()
        for process in members(group):
            process.kill()
        launcher.communicate(timeout=DEADLINE)


def test_a_launcher_that_ends_well_has_ended_its_own():
    child = subprocess.Popen(SLEEPERS, start_new_session=True)
    other = subprocess.Popen(SLEEPERS, start_new_session=True)
    try:
        with OrphanGuard() as guard:
            guard.add(child.pid)
            guard.add(other.pid)
            guard.forget(other.pid)
        assert len(members(child.pid)) >= 1  # nothing is killed after `done`
        with OrphanGuard() as guard:
            guard.add(child.pid)
            guard.add(other.pid)
            guard.forget(other.pid)
            guard._input.close()  # as at the launcher's death
            wait_for(lambda: not members(child.pid))
            assert len(members(other.pid)) >= 1
            guard._tell = lambda line: None  # type: ignore[method-assign]  # the launcher is dead
    finally:
        for process in (child, other):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_job_whose_guard_is_killed_ends_as_it_would_have(tmp_path):
    waits = "echo ready; for i in $(seq 1000); do [ -e said ] && exit 0; sleep 0.1; done; exit 1"
    command = [sys.executable, "-m", "tfdist.launch", "--log_dir=logs", "--", "sh", "-c", waits]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        read_line(launcher.stdout)
        [guard] = [one for one in psutil.Process(launcher.pid).children() if reaper.__file__ in one.cmdline()]
        guard.kill()
        (tmp_path / "said").touch()
        said = launcher.communicate(timeout=DEADLINE)[1]
    assert launcher.returncode == 0, said
    assert "Traceback" not in said


@pytest.mark.parametrize("ends", ["killed", "by itself"])
def test_no_daemon_of_a_rank_is_left(ends, tmp_path):
    """The rank starts one in a session of its own, and one whose parent ends as well."""
    waits = "until test -e go; do sleep 0.1; done; test -e stay && sleep 1000; true"
    command = ["sh", "-c", f"setsid sleep 1000 & (setsid sleep 1000 &) ; {waits}"]
    if ends == "killed":
        (tmp_path / "stay").touch()
    with Launches(tmp_path) as launch:
        launcher = launch(*command, flags=("--processes=1",))
        wait_for(lambda: len(launch.running("sleep")) == 2)
        (tmp_path / "go").touch()
        if ends == "killed":
            launcher.process.kill()
        launcher.wait()
        wait_for(lambda: not launch.running())
