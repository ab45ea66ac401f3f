"""Trials of a batch size: jobs on this host under a memory limit, forked from a process that has done their imports."""

import contextlib
import io
import os
import pathlib
import signal
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from tfdist.errors import ExitCode, InputError, TfdistError, TrialError
from tfdist.errors.exit_codes import SIGNALLED
from tfdist.finders.memory_limit import MemoryLimit
from tfdist.launcher import job_runner
from tfdist.launcher.fork_server import ForkServer
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.orphan_guard import OrphanGuard
from tfdist.launcher.supervision import deadline

SECONDS = 300.0  # for a trial
_PRELOADED = "tfdist.cli.training_imports"
_GRACE_SECONDS = 1.0


class Trial(NamedTuple):
    """How a batch size went.

    Attributes:
      batch_size: global batch size.
      refused: why it cannot be used, such as "more than 2.0 GiB"; empty if it can.
      examples_per_second: speed; 0 if it cannot be used.
      memory_bytes: the most memory that the processes had together.
    """

    batch_size: int
    refused: str
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
    """Runs trials, one after the other. Imports begin when it is entered; no process is left at its end."""

    def __init__(self, prepare: Prepare, *, memory: int, seconds: float, processes: int, launcher: str):
        """Initializes the trials.

        Args:
          prepare: says what a trial runs.
          memory: bytes that the processes of a trial may have together.
          seconds: after which a trial is ended.
          processes: number of processes of a trial.
          launcher: how they find each other; see `Job`.
        """
        self._prepare, self._memory, self._seconds = prepare, memory, seconds
        self._job = Job(processes=processes, launcher=launcher, grace_seconds=_GRACE_SECONDS)

    def __enter__(self) -> "Trials":
        with contextlib.ExitStack() as stack:
            guard = stack.enter_context(OrphanGuard())  # cleans up if this process is killed
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-find-"))
            guard.add_directory(self._folder)
            self._server = stack.enter_context(ForkServer([_PRELOADED], os.environ))
            guard.add(self._server.pid)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def __call__(self, batch_size: int) -> Trial:
        """Tries a batch size.

        Raises:
          TrialError: a process failed, but not for lack of memory.
        """
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
            return self._trial(batch_size, pathlib.Path(folder))

    def _trial(self, batch_size: int, folder: pathlib.Path) -> Trial:
        prepared = self._prepare(batch_size, folder)
        limit = MemoryLimit(self._memory)
        outcome = self._run(prepared, folder / "logs", limit)
        refused = f"more than {limit.text}" if limit.exceeded else _refused(outcome, self._seconds)
        if refused:
            return Trial(batch_size, refused, 0.0, limit.peak)
        if outcome.code:
            raise _failed(batch_size, outcome, prepared)
        return Trial(batch_size, "", prepared.speed(), limit.peak)

    def _run(self, prepared: Prepared, logs: pathlib.Path, limit: MemoryLimit) -> Outcome:
        said = io.StringIO()  # the logs have it as well
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return job_runner.run(
                Job(**{**vars(self._job), "log_dir": str(logs)}),
                prepared.command,
                os.environ,
                start=limit.starting(self._server.start),
                stops=[limit, deadline(self._seconds)],
            )


def _refused(outcome: Outcome, seconds: float) -> str:
    """Returns why a size cannot be used, given how its job ended; empty if it can, or if the job failed otherwise."""
    if outcome.code == ExitCode.OUT_OF_MEMORY:
        return "out of memory on a device"
    if outcome.code == SIGNALLED + signal.SIGKILL:
        return "killed by the system, probably for lack of memory"
    if outcome.code == ExitCode.STALLED and outcome.rank is None:
        return f"longer than {seconds:g} s"
    return ""


def _failed(batch_size: int, outcome: Outcome, prepared: Prepared) -> TfdistError:
    said = prepared.failure(outcome.rank) if outcome.rank is not None else ""
    said = said or _last_line(outcome.log)
    if outcome.code == ExitCode.BAD_INPUT and said:
        return InputError(said)
    cause = f": {said}" if said else "."
    return TrialError(f"A trial with a batch of {batch_size} examples failed, as {outcome.reason}{cause}", outcome.code)


def _last_line(log: pathlib.Path | None) -> str:
    """Returns the last line that a process has printed, without the name of its command."""
    text = log.read_text(encoding="utf-8", errors="replace") if log and log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last.partition(": ")[2] if last.startswith("tfdist.") else last
