"""An attempt as whoever decides sees it: who runs it, and what they have reported."""

import dataclasses
import math
from collections.abc import Sequence

from tfdist.errors import ExitCode
from tfdist.launcher.orders import Report
from tfdist.launcher.outcome import SUCCESS, Outcome

SURELY_BEGUN_SECONDS = 3600.0  # behind which a program trains, also one that notes no steps

_SAYS_LITTLE = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST)  # less than any other code, the first the least


@dataclasses.dataclass
class AttemptState:
    """An attempt that runs.

    Attributes:
      number: counts the attempts of a job.
      processes: how many each launcher runs, in the order of ranks.
      address: where the launchers meet.
      token: what they show there.
      since: when it was begun.
      reports: of those that have ended.
      stops: why it was told to stop.
      ends: since when all of it has to end.
    """

    number: int
    processes: dict[str, int]
    address: str
    token: str
    since: float
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    stops: Outcome | None = None
    ends: float | None = None

    @property
    def size(self) -> int:
        """How many processes it has."""
        return sum(self.processes.values())

    @property
    def awaited(self) -> list[str]:
        """The launchers that have not reported."""
        return [name for name in self.processes if name not in self.reports]

    def overdue(self, now: float) -> float:
        """For how many seconds all of it has had to end: it was told to stop, or a launcher has failed, or was asked to end.

        Those whose processes end with code 0 or 75 tell the others nothing: theirs end when they want. To be asked often.
        """
        if self.ends is None and (self.stops or any(map(_ends_all, self.reports.values()))):
            self.ends = now
        return -math.inf if self.ends is None else now - self.ends

    @property
    def step(self) -> int | None:
        """The last that any rank has noted; None if none has."""
        return max((report.step for report in self.reports.values() if report.step is not None), default=None)

    def has_begun(self, now: float) -> bool:
        """Whether training has."""
        return self.step is not None or now - self.since >= SURELY_BEGUN_SECONDS

    @property
    def is_final(self) -> bool:
        """Whether a rank has noted that nothing must be started again."""
        return any(report.final for report in self.reports.values())

    def cause(self) -> Outcome:
        """Of the launchers' outcomes the one that is no consequence of another's, and names a rank."""
        outcomes = [report.outcome for report in self.reports.values()]
        if self.awaited:
            outcomes.append(loss_of(self.awaited))
        return max(outcomes, key=_says, default=SUCCESS)


def loss_of(launchers: Sequence[str]) -> Outcome:
    """How an attempt ends when launchers are lost."""
    return Outcome(ExitCode.PEER_LOST, f"{', '.join(launchers)} is lost")


def _ends_all(report: Report) -> bool:
    return report.stopped or report.outcome.code not in (ExitCode.DONE, ExitCode.PREEMPTED)


def _says(outcome: Outcome) -> tuple[int, bool]:
    code = outcome.code
    return _SAYS_LITTLE.index(ExitCode(code)) if code in _SAYS_LITTLE else len(_SAYS_LITTLE), outcome.rank is not None
