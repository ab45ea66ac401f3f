"""Runs what may crash or hang in processes of its own, with a deadline for each.

The processes are forked from one that has imported TensorFlow and Keras, so that these imports take their time once.
"""

import contextlib
import io
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from tfdist.errors import ExitCode, TfdistError, exit_codes
from tfdist.launcher import job_runner
from tfdist.launcher.fork_server import ForkServer
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.orphan_guard import OrphanGuard
from tfdist.launcher.supervision import deadline

_PRELOADED = "tfdist.cli.training_imports"
_GRACE_SECONDS = 1.0


class Ended(NamedTuple):
    """How the processes of a program ended.

    Attributes:
      code: exit code of the process that caused a failure, or 0.
      reason: why it failed, as one line; empty if it did not.
      text: what the process that caused a failure has printed; that of rank 0 if none failed.
      seconds: how long it took.
    """

    code: int
    reason: str
    text: str
    seconds: float


class Children:
    """Starts programs of tfdist, one after the other. The imports begin when it is entered; nothing is left at its end."""

    def __enter__(self) -> "Children":
        with contextlib.ExitStack() as stack:
            guard = stack.enter_context(OrphanGuard())  # cleans up if this process is killed
            self._logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-doctor-"))
            guard.add_directory(self._logs)
            self._server = stack.enter_context(ForkServer([_PRELOADED], os.environ))
            guard.add(self._server.pid)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def import_problem(self, seconds: float) -> str:
        """Waits for the imports; returns why they failed, as one line, or an empty text.

        Args:
          seconds: how long to wait.
        """
        end = time.monotonic() + seconds
        try:
            self._server.wait_until_ready(lambda: time.monotonic() > end)
        except OSError as error:
            late = time.monotonic() > end
            return f"the imports did not end within {seconds:g} s" if late else str(error)
        return ""

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        processes: int,
        seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> Ended:
        """Runs `python -m MODULE ...` in one or several processes that find each other, and waits for their end.

        Args:
          module: name of the module.
          arguments: its arguments.
          processes: number of processes.
          seconds: after which they are ended.
          variables: environment variables to add.
        """
        began = time.monotonic()
        command = [sys.executable, "-m", module, *arguments]
        logs = tempfile.mkdtemp(dir=self._logs)
        job = Job(processes=processes, log_dir=logs, grace_seconds=_GRACE_SECONDS)
        try:
            outcome = self._run(job, command, {**os.environ, **(variables or {})}, seconds)
        except (TfdistError, OSError) as error:  # it could not be started
            outcome = Outcome(ExitCode.FAILED, str(error))
        log = outcome.log or pathlib.Path(logs) / "rank-0.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        reason = _reason(outcome, text) if outcome.code else ""
        return Ended(outcome.code, reason, text, time.monotonic() - began)

    def _run(self, job: Job, command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Outcome:
        said = io.StringIO()  # the logs have it as well
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return job_runner.run(
                job, lambda rank: command, environment, start=self._server.start, stops=[deadline(seconds)]
            )


def _reason(outcome: Outcome, text: str) -> str:
    """Returns why processes failed: what the one that caused it said last, unless it was ended from outside."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if outcome.rank is None or outcome.code > exit_codes.SIGNALLED or not lines:
        return outcome.reason
    last = lines[-1]
    return last.partition(": ")[2] if last.startswith("tfdist.") else last
