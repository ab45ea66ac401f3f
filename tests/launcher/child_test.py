import os
import pathlib
import signal
import time

import pytest

from tests.launcher.launching import ends
from tests.waiting import wait_for
from tfdist.errors import InputError
from tfdist.launcher import child as child_module
from tfdist.launcher.child import Child, Task

pytestmark = [pytest.mark.processes, pytest.mark.waits]


@pytest.fixture
def start():
    children = []

    def create(*command, **environment):
        children.append(Child(Task(0, command, {"PATH": os.environ["PATH"], **environment}, pathlib.Path("log"))))
        return children[-1]

    yield create
    for child in children:
        child.reap()
        child.out.close()
        child.err.close()


def wait(child):
    wait_for(child.poll)
    return child.code


def test_a_signal_reaches_grandchildren_and_is_remembered(start):
    child = start("sh", "-c", "sleep 1000 & echo $!; wait")
    grandchild = int(child.out.readline())
    child.signal(signal.SIGTERM)
    assert wait(child) == 143 and child.signaled
    assert ends(grandchild)


def test_who_ended_before_the_signal_was_not_ended_by_it(start):
    child = start("sh", "-c", "exit 3")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.signal(signal.SIGTERM)
    assert child.code == 3 and not child.signaled


def test_reaping_ends_what_the_process_left(start):
    child = start("sh", "-c", "sleep 1000 & echo $!")
    grandchild = int(child.out.readline())
    assert wait(child) == 0
    assert pathlib.Path(f"/proc/{child.pid}").exists()  # its pid has not been reused
    child.reap()
    assert not pathlib.Path(f"/proc/{child.pid}").exists()
    assert ends(grandchild)


def test_a_program_that_is_not_there_is_bad_input(start):
    with pytest.raises(InputError, match=r'Received: "no-such-program" \(No such file or directory\)'):
        start("no-such-program")


def test_a_process_that_cannot_be_killed_is_left(start, monkeypatch, caplog):
    """Simulates a process that waits in the kernel for a disk, which no signal can reach."""
    children = [start("sleep", "1000") for _ in range(10)]
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(child_module, "REAP_SECONDS", 2.0)
        patched.setattr(os, "killpg", lambda group, number: None)
        for one in children:
            one.signal(signal.SIGKILL)
        for one in children:
            one.reap()
    assert 1.9 < time.monotonic() - began < 10 * 2.0  # one time limit for all
    assert [one.code for one in children] == [137] * 10
    assert len(caplog.messages) == 10 and "has not ended 2 s after SIGKILL" in caplog.messages[0]
    for one in children:
        assert pathlib.Path(f"/proc/{one.pid}").exists()
