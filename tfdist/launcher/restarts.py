"""Decides whether and when a job is restarted."""

import math
import signal
from typing import NamedTuple

from tfdist.errors import ExitCode, exit_codes
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome

LONGEST_BACKOFF_SECONDS = 60.0
MAX_EARLY_FAILURES = 5  # failures in a row before training began; some may be due to the network or a host that is late
MAX_LATER_FAILURES = 15  # in a row after training began; with the delays, an outage of ten minutes is tolerated
# A finished job is done; bad input stays bad; a loss that is not finite recurs, because a resumed run repeats its
# steps.
FINAL = frozenset({ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NOT_FINITE})

# SIGTERM counts because only schedulers send it, perhaps to a process that cannot save yet or has already saved.
PREEMPTIONS = frozenset({ExitCode.PREEMPTED, exit_codes.SIGNALLED + signal.SIGTERM})


class Decision(NamedTuple):
    """What follows the end of an attempt.

    Attributes:
      wait: seconds until the next attempt; None if there is none.
      reason: why, as the end of a sentence; empty if no explanation is needed.
    """

    wait: float | None
    reason: str = ""


class Restarts:
    """Counts a job's restarts after failures and after preemptions, each with its own budget.

    A repeated failure is not retried: two attempts in a row that fail after the same step, which is the last one that a
    rank has recorded in its `tfdist.process.progress_file`. Without a recorded step, training has not begun, or the
    program records nothing. Then the budget decides; if it is unlimited, `MAX_EARLY_FAILURES` failures in a row count as a
    repeated failure, or `MAX_LATER_FAILURES` if training had begun before.
    """

    def __init__(self, job: Job):
        """Initializes with a `job`, which has the budgets and the first pause."""
        self._job = job
        self._failures = self._preemptions = 0
        self._failed_after: int | None = None
        self._early_failures = self._left_early = 0  # failures, and preemptions, in a row before training began
        self._most = MAX_EARLY_FAILURES

    def decide(self, outcome: Outcome, step: int | None, *, may_repeat: bool = True, final: bool = False) -> Decision:
        """Decides what follows the end of an attempt, and counts it.

        Args:
          outcome: outcome of the attempt.
          step: last step that any rank has recorded in it; None if none has.
          may_repeat: whether the same end once more would be a repeated failure.
          final: whether a rank has recorded that the job must not be restarted.
        """
        if outcome.code in FINAL:
            return Decision(None)
        if final:
            return Decision(None, "the saved state may be wrong, too, so the job is not restarted")
        if step is not None:
            self.begun()
        # With code 75 the program itself requests a restart; after a SIGTERM it does not.
        counts = step is None and may_repeat and outcome.code != ExitCode.PREEMPTED
        self._early_failures += counts
        is_vain = counts and self._early_failures >= self._most
        if outcome.code in PREEMPTIONS:
            return self._after_preemption(step, is_vain)
        return self._after_failure(step, may_repeat, is_vain)

    def resized(self) -> None:
        """Records that the attempt was stopped to change the number of processes, which is not a failure."""
        self._failed_after = None

    def begun(self) -> None:
        """Records that training has begun, which resets the count of failures before training."""
        self._early_failures = self._left_early = 0
        self._most = MAX_LATER_FAILURES

    def _after_preemption(self, step: int | None, is_vain: bool) -> Decision:
        self._failed_after = None
        budget = self._job.preemption_budget
        if self._preemptions == budget:
            return _used_up(self._preemptions, "max_preemptions")
        if is_vain and budget == math.inf:
            return self._given_up("max_preemptions")
        pause = max(self._job.restart_backoff_seconds, self._pause(self._left_early))
        self._preemptions += 1
        self._left_early += step is None
        return Decision(pause, f"restart {self._preemptions}{_of(budget)} after preemptions")

    def _after_failure(self, step: int | None, may_repeat: bool, is_vain: bool) -> Decision:
        before, self._failed_after = self._failed_after, step if may_repeat else None
        budget = self._job.restart_budget
        if self._failures == budget:
            return _used_up(self._failures, "max_restarts")
        if may_repeat and step is not None and step == before:
            return Decision(None, f"the second failure in a row after step {step}, so the job is not restarted")
        if is_vain and budget == math.inf:
            return self._given_up("max_restarts")
        pause = self._pause(self._failures)
        self._failures += 1
        after = "" if step is None else f" after step {step}"
        return Decision(pause, f"restart {self._failures}{_of(budget)}{after}")

    def _given_up(self, flag: str) -> Decision:
        what = "began" if self._most == MAX_EARLY_FAILURES else "made progress"
        before = f"{self._early_failures} failures in a row before training {what}"
        return Decision(None, f"{before}, so the job is not restarted; --{flag}=N sets another limit")

    def _pause(self, before: int) -> float:
        return min(LONGEST_BACKOFF_SECONDS, self._job.restart_backoff_seconds * 2 ** min(before, 30))


def _of(budget: float) -> str:
    return "" if budget == math.inf else f" of {budget:g}"


def _used_up(count: int, flag: str) -> Decision:
    return Decision(None, f"--{flag}={count} is used up" if count else "")
