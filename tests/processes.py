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

__all__ = ["Ended", "Job", "free_addresses", "job", "start"]


@contextlib.contextmanager
def job(command: Sequence[str], size: int, environment: Mapping[str, str] | None = None) -> Iterator[Job]:
    """See `tfdist.testing.processes.job`."""
    with processes.job(command, size, environment, start=start) as started:
        yield started


def start(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, directory: str | None = None
) -> Process:
    """See `tfdist.testing.processes.start`; forks where that is possible."""
    if can_fork(command) and not _is_launcher(command):
        return _servers().start(command, environment, output, directory or "")
    return processes.start(command, environment, output, directory)


def _is_launcher(command: Sequence[str]) -> bool:
    """Whether a command starts a launcher, which imports no TensorFlow."""
    return [*command[1:3]] == ["-m", "tfdist.launch"]


@functools.cache
def _servers() -> Servers:
    return Servers()
