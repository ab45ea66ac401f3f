"""Trials of batch sizes: jobs on this host with a memory limit."""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import psutil

from tfdist.errors import SIGNAL_OFFSET, ExitCode, InputError, TfdistError, TrialError, byte_size
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_runner import CapturedJobs, last_line, read_log
from tfdist.launcher.supervision import Stop, deadline

# The processes of a job have a common memory limit, and are terminated when they exceed it. Their resident memory is polled,
# because the kernel's resource limits count address space, of which TensorFlow reserves several times what it uses.

_MEMORY_FRACTION = 0.9  # of the available memory; between two measurements, processes may use more
_SECONDS_BETWEEN_LISTINGS = 0.5
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_MAX_OOM_SCORE = "1000"  # the kernel kills this process first if the host runs out of memory


def available_bytes() -> int:
    """Returns 90% of the available memory of the host, or of a container with a limit."""
    candidates = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):  # without a limit, "max"
        limit, usage = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        candidates.append(limit - usage)
    return int(max(min(candidates), 1) * _MEMORY_FRACTION)


def resident_bytes(pids: Iterable[int]) -> int:
    """Returns the total memory of processes, without file-backed pages; processes that have ended do not count."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            memory = psutil.Process(pid).memory_info()
            total += memory.rss - memory.shared
    return total


class MemoryLimit:
    """A condition that stops a job when its processes exceed a memory limit.

    Attributes:
      peak: the largest measured memory of all processes, in bytes.
      exceeded: whether the limit has been exceeded.
      text: the limit as text.
    """

    def __init__(self, limit: int):
        """Initializes the limit, in bytes, for processes that this one and its children start afterwards."""
        self.peak = 0
        self.exceeded = False
        self.text = byte_size(limit)
        self._limit = limit
        self._other_pids = {child.pid for child in psutil.Process().children(recursive=True)}
        self._pids: list[int] = []
        self._last_listed = 0.0

    def __call__(self) -> Stop | None:
        """Measures the processes; returns why they must be stopped, or None."""
        now = time.monotonic()
        if now - self._last_listed > _SECONDS_BETWEEN_LISTINGS:
            self._last_listed = now
            children = psutil.Process().children(recursive=True)
            self._pids = [child.pid for child in children if child.pid not in self._other_pids]
            for pid in self._pids:
                with contextlib.suppress(OSError):
                    pathlib.Path(f"/proc/{pid}/oom_score_adj").write_text(_MAX_OOM_SCORE)
        used_bytes = resident_bytes(self._pids)
        self.peak = max(self.peak, used_bytes)
        self.exceeded = self.exceeded or used_bytes > self._limit
        if not self.exceeded:
            return None
        return Stop(Outcome(ExitCode.OUT_OF_MEMORY, f"more than {self.text}"), sigkill_delay_seconds=0.0)


TRIAL_SECONDS = 300.0  # maximum time of a trial


class Trial(NamedTuple):
    """The result of trying a batch size.

    Attributes:
      batch_size: global batch size.
      failure: why the size cannot be used, such as "more than 2.0 GiB"; empty if it can be used.
      examples_per_second: speed; 0 if the size cannot be used.
      memory_bytes: peak memory of all processes.
    """

    batch_size: int
    failure: str
    examples_per_second: float
    memory_bytes: int


class TrialProgram(NamedTuple):
    """The commands and results of a trial."""

    command: Callable[[int], Sequence[str]]  # returns the command of a rank
    speed: Callable[[], float]  # returns the examples per second, after a success
    failure: Callable[[int], str] = lambda rank: ""  # returns why a rank failed, or "" if only its output is known


# Takes a batch size and a directory for the files of its trial.
Prepare = Callable[[int, pathlib.Path], TrialProgram]


class Trials(CapturedJobs):
    """A context that runs trials one after the other, and terminates their processes on exit."""

    def __init__(self, prepare: Prepare, job: Job, *, memory: int, seconds: float):
        """Initializes the trials, each of which may use `memory` bytes, over all of its processes, and `seconds` seconds."""
        super().__init__("tfdist-find-")
        self._prepare, self._job, self._memory, self._seconds = prepare, job, memory, seconds

    def __call__(self, batch_size: int) -> Trial:
        """Tries a batch size; raises `TrialError` if a process failed for a reason other than memory."""
        limit = MemoryLimit(self._memory)
        stops: list[Callable[[], Stop | None]] = [limit, deadline(self._seconds)]
        with self.new_directory() as folder:
            program = self._prepare(batch_size, folder)
            outcome = self.run(self._job, folder / "logs", program.command, os.environ, stops=stops)
            failure = f"more than {limit.text}" if limit.exceeded else _failure(outcome, self._seconds)
            if failure:
                return Trial(batch_size, failure, 0.0, limit.peak)
            if outcome.code:
                raise _trial_error(batch_size, outcome, program)
            return Trial(batch_size, "", program.speed(), limit.peak)


def _failure(outcome: Outcome, seconds: float) -> str:
    """Returns why a size cannot be used; empty if it can be used, or if the job failed for another reason."""
    if outcome.code == ExitCode.OUT_OF_MEMORY:
        return "out of memory on a device"
    if outcome.code == SIGNAL_OFFSET + signal.SIGKILL:
        return "killed by the system, probably for lack of memory"
    if outcome.code == ExitCode.STALLED and outcome.rank is None:
        return f"longer than {seconds:g} s"
    return ""


def _trial_error(batch_size: int, outcome: Outcome, program: TrialProgram) -> TfdistError:
    message = program.failure(outcome.rank) if outcome.rank is not None else ""
    message = message or last_line(read_log(outcome.log))
    if outcome.code == ExitCode.BAD_INPUT and message:
        return InputError(message)
    cause = f": {message}" if message else "."
    return TrialError(f"A trial with batch size {batch_size} failed because {outcome.reason}{cause}", outcome.code)
