"""Real processes for tests, forked where that is possible: `tests.fork_server` has their imports behind it.

A test of how a program is started, as by its user, takes `tfdist.testing.processes` instead.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from tests.fork_server import Servers, can_fork
from tfdist.testing import processes
from tfdist.testing.processes import Ended, Job, Process, free_addresses

__all__ = ["Ended", "Job", "free_addresses", "job"]


@contextlib.contextmanager
def job(command: Sequence[str], size: int, environment: Mapping[str, str] | None = None) -> Iterator[Job]:
    """See `tfdist.testing.processes.job`."""
    with processes.job(command, size, environment, start=_start) as started:
        yield started


@functools.cache
def _servers() -> Servers:
    return Servers()


def _start(command: Sequence[str], environment: Mapping[str, str], output: BinaryIO) -> Process:
    if can_fork(command):
        return _servers().start(command, environment, output)
    return processes.start(command, environment, output)
