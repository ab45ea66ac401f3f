"""State of an attempt in the job controller: its launchers and their reports."""

import dataclasses
import math
from collections.abc import Sequence

from tfdist.errors import ExitCode
from tfdist.launcher.job_result import SUCCESS, Outcome
from tfdist.launcher.orders import Report

_SUSPENDED_SECONDS = 5.0  # between two polls if this process was suspended; launchers poll many times a second
SURELY_BEGUN_SECONDS = 3600.0  # after which training is assumed to have begun, even without recorded steps

# Exit codes that are least likely to be the cause, least likely first.
_LEAST_SPECIFIC = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST)


@dataclasses.dataclass
class AttemptState:
    """State of a running attempt.

    Attributes:
      number: number of the attempt in its job.
      processes: number of processes of each launcher, in the order of ranks.
      address: where the launchers' group is served.
      purpose: from which, with the job's token, that group's token is derived.
      since: time at which it began.
      reports: reports of launchers whose processes have ended.
      stops: why it was ordered to stop; None if it was not.
      ends: time since which all of its processes have to end; None if they have not.
      polled: time of the last poll since then.
      awake: seconds since then, except while this process was suspended.
    """

    number: int
    processes: dict[str, int]
    address: str
    purpose: str
    since: float
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    stops: Outcome | None = None
    ends: float | None = None
    polled: float = 0.0
    awake: float = 0.0

    @property
    def size(self) -> int:
        """Total number of processes."""
        return sum(self.processes.values())

    @property
    def awaited(self) -> list[str]:
        """Launchers that have not reported."""
        return [name for name in self.processes if name not in self.reports]

    def overdue(self, now: float) -> float:
        """Returns for how many seconds all processes have had to end; -inf if they have not.

        They have to end if the attempt was ordered to stop, or if a launcher failed or was asked to end. A launcher
        whose processes end with code 0 or 75 does not notify the others, whose processes end when they like. To be
        polled, because the first call that detects the condition starts the time.
        """
        if self.ends is None and (self.stops or any(map(_ends_all, self.reports.values()))):
            self.ends = self.polled = now
        self.awake += min(now - self.polled, _SUSPENDED_SECONDS) if self.ends is not None else 0.0
        self.polled = now
        return -math.inf if self.ends is None else now - self.ends

    @property
    def step(self) -> int | None:
        """Last step that any rank has recorded, or None."""
        return max((report.step for report in self.reports.values() if report.step is not None), default=None)

    def has_begun(self, now: float) -> bool:
        """Returns whether training has begun."""
        return self.step is not None or now - self.since >= SURELY_BEGUN_SECONDS

    @property
    def is_final(self) -> bool:
        """Whether a rank has recorded that the job must not be restarted."""
        return any(report.final for report in self.reports.values())

    def cause(self) -> Outcome:
        """Returns the launchers' outcome that most likely caused the others, preferring one that names a rank."""
        outcomes = [report.outcome for report in self.reports.values()]
        if self.awaited:
            outcomes.append(loss_of(self.awaited))
        return max(outcomes, key=_says, default=SUCCESS)


def loss_of(launchers: Sequence[str]) -> Outcome:
    """Returns the outcome of an attempt whose launchers are lost."""
    return Outcome(ExitCode.PEER_LOST, f"{', '.join(launchers)} is lost")


def _ends_all(report: Report) -> bool:
    return report.stopped or report.outcome.code not in (ExitCode.DONE, ExitCode.PREEMPTED)


def _says(outcome: Outcome) -> tuple[int, bool]:
    code = outcome.code
    return _LEAST_SPECIFIC.index(ExitCode(code)) if code in _LEAST_SPECIFIC else len(
        _LEAST_SPECIFIC
    ), outcome.rank is not None
