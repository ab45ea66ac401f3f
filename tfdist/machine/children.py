"""Runs what may crash or hang in processes of its own, with a deadline for each."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.errors import ExitCode, TfdistError, exceptions
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_runner import CapturedJobs, last_line, read_log
from tfdist.launcher.supervision import deadline


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
    """Starts programs of tfdist, one after the other; nothing is left at its end."""

    def __init__(self) -> None:
        """Initializes without a process."""
        self._jobs = CapturedJobs("tfdist-doctor-")

    def __enter__(self) -> "Children":
        self._jobs.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._jobs.__exit__(*error)

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
        with self._jobs.new_directory() as logs:
            try:
                outcome = self._jobs.run(
                    Job(processes=processes),
                    logs,
                    lambda rank: command,
                    {**os.environ, **(variables or {})},
                    stops=[deadline(seconds)],
                )
            except (TfdistError, OSError) as error:  # it could not be started
                outcome = Outcome(ExitCode.FAILED, str(error))
            text = read_log(outcome.log or logs / "rank-0.log")
        reason = _reason(outcome, text) if outcome.code else ""
        return Ended(outcome.code, reason, text, time.monotonic() - began)


def _reason(outcome: Outcome, text: str) -> str:
    """Returns why processes failed: what the one that caused it said last, unless it was ended from outside."""
    if outcome.rank is None or outcome.code > exceptions.SIGNALLED:
        return outcome.reason
    return last_line(text) or outcome.reason
