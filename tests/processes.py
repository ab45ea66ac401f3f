"""Real processes for tests, forked where possible from `tests.fork_server`, which has done their imports.

So are launchers and the ranks that they start. Tests of how a user starts a program use `tests.jobs` instead.
"""

import contextlib
import functools
import importlib.util
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import pytest

from tests import jobs
from tests.fork_server import Forked, Servers, can_fork
from tests.jobs import EndedProcess, Job, free_addresses

__all__ = ["ONE_THREAD", "EndedProcess", "Job", "finish", "free_addresses", "job", "start"]

ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}

_HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
_NAMES_HOROVOD = re.compile(r"horovodrun|=horovod| horovod\b|import tfdist\.horovod")


@contextlib.contextmanager
def job(command: Sequence[str], size: int, environment: Mapping[str, str] | None = None) -> Iterator[Job]:
    """See `tests.jobs.job`."""
    with jobs.job(command, size, environment, start=start) as started:
        yield started


def finish(
    command: Sequence[str],
    size: int = 1,
    environment: Mapping[str, str] | None = None,
    *,
    code: int = 0,
    seconds: float = 300.0,
) -> list[str]:
    """Runs a job until all of its processes have ended with an exit code; returns their outputs."""
    with job(command, size, environment) as started:
        ended = started.wait(seconds)
    assert [end.code for end in ended] == [code] * size, "\n".join(end.output for end in ended)
    return [end.output for end in ended]


def start(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, directory: str | None = None
) -> subprocess.Popen | Forked:
    """See `tests.jobs.start`; forks where possible, and skips what needs a Horovod that is not built."""
    if not _HAS_HOROVOD and (_NAMES_HOROVOD.search(" ".join(command)) or "HOROVOD_RANK" in environment):
        pytest.skip("make horovod builds it")
    if not can_fork(command, environment):
        return jobs.start(command, environment, output, directory)
    return _servers().start(command, environment, output, directory or "")


@functools.cache
def _servers() -> Servers:
    return Servers()
