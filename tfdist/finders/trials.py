"""Trials of a batch size: jobs on this host under a memory limit."""

import os
import pathlib
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfdist.errors import ExitCode, InputError, TfdistError, TrialError
from tfdist.errors.exit_codes import SIGNALLED
from tfdist.finders.memory_limit import MemoryLimit
from tfdist.launcher.captured_jobs import CapturedJobs, last_line, read_log
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.local_process import NewProcess
from tfdist.launcher.supervision import deadline

SECONDS = 300.0  # for a trial


class Trial(NamedTuple):
    """How a batch size went.

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


class Prepared(NamedTuple):
    """What a trial runs.

    Attributes:
      command: returns the command of a rank.
      speed: returns the examples per second, after a success.
      failure: returns why a rank has failed, if it left more than its output; else "".
    """

    command: Callable[[int], Sequence[str]]
    speed: Callable[[], float]
    failure: Callable[[int], str] = lambda rank: ""


# Takes a batch size and a directory for the files of its trial.
Prepare = Callable[[int, pathlib.Path], Prepared]


class Trials:
    """Runs trials, one after the other; no process is left at its end."""

    def __init__(self, prepare: Prepare, job: Job, *, memory: int, seconds: float):
        """Initializes the trials.

        Args:
          prepare: says what a trial runs.
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
        with self._jobs.new_directory() as folder:
            return self._trial(batch_size, folder)

    def _trial(self, batch_size: int, folder: pathlib.Path) -> Trial:
        prepared = self._prepare(batch_size, folder)
        limit = MemoryLimit(self._memory)
        outcome = self._jobs.run(
            self._job,
            folder / "logs",
            prepared.command,
            os.environ,
            stops=[limit, deadline(self._seconds)],
            start=limit.starting(NewProcess),
        )
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
    if outcome.code == SIGNALLED + signal.SIGKILL:
        return "killed by the system, probably for lack of memory"
    if outcome.code == ExitCode.STALLED and outcome.rank is None:
        return f"longer than {seconds:g} s"
    return ""


def _failed(batch_size: int, outcome: Outcome, prepared: Prepared) -> TfdistError:
    message = prepared.failure(outcome.rank) if outcome.rank is not None else ""
    message = message or last_line(read_log(outcome.log))
    if outcome.code == ExitCode.BAD_INPUT and message:
        return InputError(message)
    cause = f": {message}" if message else "."
    return TrialError(f"A trial with a batch of {batch_size} examples failed, as {outcome.reason}{cause}", outcome.code)
