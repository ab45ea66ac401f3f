"""Real processes for tests, forked where possible from `tests.fork_server`, which has done their imports.

Tests of how a user starts a program use `tfdist.testing.processes` instead.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from tests.fork_server import Servers
from tfdist.launcher.fork_server import can_fork
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
    """See `tfdist.testing.processes.start`; forks where possible."""
    if can_fork(command, environment) and not _is_launcher(command):
        return _servers().start(command, environment, output, directory or "")
    return processes.start(command, environment, output, directory)


def _is_launcher(command: Sequence[str]) -> bool:
    """Returns whether a command starts a launcher, which does not import TensorFlow."""
    return [*command[1:3]] == ["-m", "tfdist.launch"]


@functools.cache
def _servers() -> Servers:
    return Servers()
