"""Starting the processes of an attempt."""

import contextlib
import os
import pathlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tfdist.launcher.attempt import Host, _ordered, _supervise
from tfdist.launcher.child import Task
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.local_process import NewProcess
from tfdist.launcher.orders import Order, OrderKind
from tfdist.launcher.supervision import Stop, Watched

pytestmark = [pytest.mark.processes, pytest.mark.waits]


class Unguarded:
    """A guard that fails to add a process."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def add(self, group: int) -> None:
        self.groups.append(group)
        raise OSError("no guard")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python closes the pipes
def test_a_process_that_cannot_be_guarded_is_not_left(tmp_path: pathlib.Path) -> None:
    guard = Unguarded()
    host = Host(Job(), cast(Any, None), {}, NewProcess, cast(Any, guard), tmp_path, None, (), (), print)
    task = Task(0, ("sleep", "1000"), {"PATH": os.environ["PATH"]}, tmp_path / "rank-0.log")
    with contextlib.ExitStack() as stack, pytest.raises(OSError, match="no guard"):
        _supervise(host, [task], Watched(), stack, 0)
    [group] = guard.groups
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_processes_of_a_launcher_that_was_given_up_end() -> None:
    """After a long hang, for example of its disk, it must not train concurrently with the others."""
    lost = Outcome(5, "this launcher has not said how its processes ended")
    host = Host(Job(), cast(Any, None), {}, NewProcess, cast(Any, None), cast(Any, None), None, (), (), print)
    order_source = SimpleNamespace(order=lambda: Order(OrderKind.OVER, outcome=lost))
    assert _ordered(host, cast(Any, order_source))() == Stop(lost, final=False)
