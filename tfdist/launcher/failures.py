"""Whose processes have died, in an attempt of an elastic job: a death takes its slot along, see `Slots`."""

from collections.abc import Collection, Mapping, Sequence

from tfdist.errors import ExitCode
from tfdist.launcher.orders import Report
from tfdist.launcher.outcome import End, Outcome

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

    Ranks that the first launcher blames, which serves the ranks' group, are dead for their own, too: that one may have ended
    them before they had ended by themselves, as they say goodbye first, are silent, or have not come.

    Args:
      processes: how many each launcher ran, in the order of ranks.
      reports: by launcher.
    """
    dead = {name: report.dead for name, report in reports.items()}
    owners = [name for name, count in processes.items() for _ in range(count)]
    blamed = _blamed(reports[owners[0]], owners) if owners[0] in reports else []
    for owner in dead:
        dead[owner] = max(dead[owner], blamed.count(owner))
    return dead


def _blamed(report: Report, owners: Sequence[str]) -> list[str]:
    """For each rank that is the cause for the first launcher, whose it is.

    That one knows its own; with code 5 another's rank is one that is lost, not one that lost others. Where ranks did not come
    in time, it is all of them: one after the other, each would take the others that time again.
    """
    cause = report.outcome
    if cause.code == ExitCode.PEER_LOST and cause.rank in report.absent:
        return [owners[rank] for rank in report.absent if 0 <= rank < len(owners)]
    if cause.rank is None or not 0 <= cause.rank < len(owners) or owners[cause.rank] == owners[0]:
        return []
    return [] if cause.code in _NO_DEATH and cause.code != ExitCode.PEER_LOST else [owners[cause.rank]]
