"""Runs programs that may crash or hang in separate processes, with a deadline for each."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfdist.errors import ExitCode, TfdistError, exceptions
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_runner import CapturedJobs, last_line, read_log
from tfdist.launcher.supervision import deadline


class Ended(NamedTuple):
    """The end of the processes of a program.

    Attributes:
      code: exit code of the process that caused a failure, or 0.
      reason: reason of a failure, as one line; empty if there is none.
      text: output of the process that caused a failure; that of rank 0 if none failed.
      seconds: duration.
    """

    code: int
    reason: str
    text: str
    seconds: float


class Children(CapturedJobs):
    """Runs programs of tfdist, one after the other; leaves no process and no file behind."""

    def __init__(self) -> None:
        super().__init__("tfdist-doctor-")

    def run_module(
        self,
        module: str,
        arguments: Sequence[str],
        processes: int,
        seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> Ended:
        """Runs `python -m MODULE ...` in one or several processes of a job, and waits for their end.

        Args:
          module: name of the module.
          arguments: its arguments.
          processes: number of processes.
          seconds: deadline, after which they are ended.
          variables: environment variables to add.
        """
        start = time.monotonic()
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **(variables or {})}
        with self.new_directory() as logs:
            try:
                outcome = self.run(
                    Job(processes=processes), logs, lambda rank: command, environment, [deadline(seconds)]
                )
            except (TfdistError, OSError) as error:  # it could not be started
                outcome = Outcome(ExitCode.FAILED, str(error))
            text = read_log(outcome.log or logs / "rank-0.log")
        reason = _reason(outcome, text) if outcome.code else ""
        return Ended(outcome.code, reason, text, time.monotonic() - start)


def _reason(outcome: Outcome, text: str) -> str:
    """Returns the reason of a failure: the last line of the process that caused it, unless it was ended from outside."""
    if outcome.rank is None or outcome.code > exceptions.SIGNAL_OFFSET:
        return outcome.reason
    return last_line(text) or outcome.reason
