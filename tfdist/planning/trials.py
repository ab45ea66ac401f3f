"""Trials of a batch size: jobs on this host under a memory limit."""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from tfdist.errors import ExitCode, InputError, TfdistError, TrialError
from tfdist.errors.exceptions import SIGNAL_OFFSET
from tfdist.errors.formatting import byte_size
from tfdist.launcher.child import LocalProcess, NewProcess, Start
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_runner import CapturedJobs, last_line, read_log
from tfdist.launcher.supervision import Stop, deadline

# A memory limit for the processes of a job, which are ended together when they exceed it.
# TensorFlow reserves several times the address space that it uses, so that a resource limit of the kernel, which counts
# reserved space, would end a process that needs little. Resident memory is read from time to time instead.

_SHARE = 0.9  # of the available memory; between two measurements, processes may use more
_SECONDS_BETWEEN_CHILDREN = 0.5
_COUNTED = ("RssAnon:", "RssShmem:")  # freed only by ending the process; pages of files can be read again
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_OF_GROUP = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_KILLED_FIRST = "1000"  # of the kernel's scores, if the host runs out of memory


def available_bytes() -> int:
    """Returns 90% of the memory that new processes can use: that of the host, or less in a container with a limit."""
    free = [psutil.virtual_memory().available]
    for limit, usage in _OF_GROUP:
        with contextlib.suppress(OSError, ValueError):  # without a limit, "max"
            free.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / usage).read_text()))
    return int(max(min(free), 1) * _SHARE)


def resident_bytes(pids: Iterable[int]) -> int:
    """Returns the memory that processes have together, without pages of files; those that have ended count nothing."""
    return sum(map(_resident, pids))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()]
        counted = [int(line[1]) * 1024 for line in lines if line and line[0] in _COUNTED]
        if counted:
            return sum(counted)
    with contextlib.suppress(psutil.Error):  # another system, or another kernel
        return int(psutil.Process(pid).memory_info().rss)
    return 0


class MemoryLimit:
    """Ends the processes of a job when they have more memory than a limit: one of the job's `stops`.

    Attributes:
      peak: the most memory that the processes were seen to have, in bytes.
      exceeded: whether they had more than the limit.
      text: the limit, for display.
    """

    def __init__(self, limit: int):
        """Initializes the limit, in bytes."""
        self.peak = 0
        self.exceeded = False
        self.text = byte_size(limit)
        self._limit = limit
        self._own: list[int] = []
        self._all: list[int] = []
        self._last_listed = 0.0

    def starting(self, start: Start) -> Start:
        """Returns `start`, such that the processes that it starts, and theirs, are counted."""

        def started(command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> LocalProcess:
            process = start(command, environment, out, err)
            self._own.append(process.pid)
            with contextlib.suppress(OSError):
                pathlib.Path(f"/proc/{process.pid}/oom_score_adj").write_text(_KILLED_FIRST)
            return process

        return started

    def __call__(self) -> Stop | None:
        """Measures the processes; returns the reason to end them, or None."""
        now = time.monotonic()
        if now - self._last_listed > _SECONDS_BETWEEN_CHILDREN or len(self._all) < len(self._own):
            self._last_listed, self._all = now, [pid for own in self._own for pid in _family(own)]
        used = resident_bytes(self._all)
        self.peak = max(self.peak, used)
        self.exceeded = self.exceeded or used > self._limit
        if not self.exceeded:
            return None
        return Stop(Outcome(ExitCode.OUT_OF_MEMORY, f"more than {self.text}"), seconds=0.0)


def _family(pid: int) -> list[int]:
    pids = [pid]
    with contextlib.suppress(psutil.Error):
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return pids


SECONDS = 300.0  # for a trial


class Trial(NamedTuple):
    """The result of trying a batch size.

    Attributes:
      batch_size: global batch size.
      failure: why it cannot be used, such as "more than 2.0 GiB"; empty if it can.
      examples_per_second: speed; 0 if it cannot be used.
      memory_bytes: the most memory that the processes had together.
    """

    batch_size: int
    failure: str
    examples_per_second: float
    memory_bytes: int


class TrialProgram(NamedTuple):
    """The commands of a trial, and its results.

    Attributes:
      command: returns the command of a rank.
      speed: returns the examples per second, after a success.
      failure: returns why a rank has failed, if it left more than its output; else "".
    """

    command: Callable[[int], Sequence[str]]
    speed: Callable[[], float]
    failure: Callable[[int], str] = lambda rank: ""


# Takes a batch size and a directory for the files of its trial.
Prepare = Callable[[int, pathlib.Path], TrialProgram]


class Trials:
    """Runs trials, one after the other; no process is left at its end."""

    def __init__(self, prepare: Prepare, job: Job, *, memory: int, seconds: float):
        """Initializes the trials.

        Args:
          prepare: returns the commands and results of a trial.
          job: its processes.
          memory: bytes that the processes of a trial may have together.
          seconds: after which a trial is ended.
        """
        self._prepare, self._job, self._memory, self._seconds = prepare, job, memory, seconds
        self._jobs = CapturedJobs("tfdist-find-")

    def __enter__(self) -> "Trials":
        self._jobs.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._jobs.__exit__(*error)

    def __call__(self, batch_size: int) -> Trial:
        """Tries a batch size.

        Raises:
          TrialError: a process failed, but not for lack of memory.
        """
        limit = MemoryLimit(self._memory)
        stops: list[Callable[[], Stop | None]] = [limit, deadline(self._seconds)]
        with self._jobs.new_directory() as folder:
            prepared = self._prepare(batch_size, folder)
            start, logs = limit.starting(NewProcess), folder / "logs"
            outcome = self._jobs.run(self._job, logs, prepared.command, os.environ, stops=stops, start=start)
            failure = f"more than {limit.text}" if limit.exceeded else _failure(outcome, self._seconds)
            if failure:
                return Trial(batch_size, failure, 0.0, limit.peak)
            if outcome.code:
                raise _failed(batch_size, outcome, prepared)
            return Trial(batch_size, "", prepared.speed(), limit.peak)


def _failure(outcome: Outcome, seconds: float) -> str:
    """Returns why a size cannot be used, given how its job ended; empty if it can, or if the job failed otherwise."""
    if outcome.code == ExitCode.OUT_OF_MEMORY:
        return "out of memory on a device"
    if outcome.code == SIGNAL_OFFSET + signal.SIGKILL:
        return "killed by the system, probably for lack of memory"
    if outcome.code == ExitCode.STALLED and outcome.rank is None:
        return f"longer than {seconds:g} s"
    return ""


def _failed(batch_size: int, outcome: Outcome, prepared: TrialProgram) -> TfdistError:
    message = prepared.failure(outcome.rank) if outcome.rank is not None else ""
    message = message or last_line(read_log(outcome.log))
    if outcome.code == ExitCode.BAD_INPUT and message:
        return InputError(message)
    cause = f": {message}" if message else "."
    return TrialError(f"A trial with a batch of {batch_size} examples failed, as {outcome.reason}{cause}", outcome.code)
