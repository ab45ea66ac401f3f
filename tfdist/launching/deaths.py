"""Whose processes have died, in an attempt of an elastic job: a death takes its slot along, see `Slots`."""

from collections.abc import Collection, Mapping, Sequence

from tfdist.errors import ExitCode
from tfdist.launching.orders import Report
from tfdist.launching.outcome import End, Outcome

# Ends that are no process's own death: done, preempted, a lost peer; and a stall, which ends all.
_NO_DEATH = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.STALLED)


def own(ends: Collection[End], cause: Outcome) -> int:
    """How many of a launcher's processes have ended by a failure of their own.

    The cause may have said goodbye before, and be signalled then; or have fallen silent, so that only a signal ended it.

    Args:
      ends: of the launcher's processes; all have ended.
      cause: as the launcher saw it.
    """
    died = {end.rank for end in ends if not end.signalled and end.code not in _NO_DEATH}
    silent = {end.rank for end in ends if end.signalled and cause.code == ExitCode.PEER_LOST}
    named = {end.rank for end in ends if cause.code not in _NO_DEATH} | silent
    return len(died | ({cause.rank} & named))


def by_launcher(processes: Mapping[str, int], reports: Mapping[str, Report]) -> dict[str, int]:
    """How many processes of each launcher that has reported have died.

    A rank that the first launcher names, which serves the ranks' group, is dead for its own, too: that one may have ended it
    before it had ended by itself, as it says goodbye first, or is silent.

    Args:
      processes: how many each launcher ran, in the order of ranks.
      reports: by launcher.
    """
    dead = {name: report.dead for name, report in reports.items()}
    owners = [name for name, count in processes.items() for _ in range(count)]
    first = owners[0]
    owner = _blamed(reports[first].outcome, owners) if first in reports else None
    if owner in dead and owner != first:
        dead[owner] = max(dead[owner], 1)
    return dead


def _blamed(cause: Outcome, owners: Sequence[str]) -> str | None:
    """Whose rank is the cause; with code 5, of another launcher, it is one that is lost, not one that lost others."""
    if cause.rank is None or not 0 <= cause.rank < len(owners):
        return None
    return None if cause.code in _NO_DEATH and cause.code != ExitCode.PEER_LOST else owners[cause.rank]
