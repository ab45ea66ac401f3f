"""The start of an attempt's processes."""

import contextlib
import os
import pathlib
from typing import Any, cast

import pytest

from tfdist.launching.attempt import Host, _supervise
from tfdist.launching.child import Task
from tfdist.launching.job import Job
from tfdist.launching.supervision import Watched

pytestmark = pytest.mark.alone


class Unguarded:
    """Fails when it is told of a process."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def add(self, group: int) -> None:
        self.groups.append(group)
        raise OSError("no guard")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the pipes are left to Python
def test_a_process_that_cannot_be_guarded_is_not_left(tmp_path: pathlib.Path) -> None:
    guard = Unguarded()
    host = Host(Job(), cast(Any, None), {}, cast(Any, guard), tmp_path, None, (), (), print)
    task = Task(0, ("sleep", "1000"), {"PATH": os.environ["PATH"]}, tmp_path / "rank-0.log")
    with contextlib.ExitStack() as stack, pytest.raises(OSError, match="no guard"):
        _supervise(host, [task], Watched(), stack, 0)
    [group] = guard.groups
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
