"""Counts the failed processes of each launcher in an elastic job's attempt; each one disables a slot, see `Slots`."""

from collections.abc import Collection, Mapping, Sequence

from tfdist.errors import ExitCode
from tfdist.launcher.job_result import Outcome, ProcessEnd
from tfdist.launcher.orders import Report

# Exit codes that are not a process's own failure: done, preempted, lost a peer; and a stall, which ends all processes.
_NOT_OWN_FAILURES = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.STALLED)


def own(ends: Collection[ProcessEnd], cause: Outcome) -> int:
    """Returns how many of a launcher's processes ended because of their own failure.

    The process that is the cause may have been signalled after it announced its failure, or because it had become
    silent.

    Args:
      ends: the ends of all of the launcher's processes.
      cause: the cause of the end, as seen by the launcher.
    """
    died = {end.rank for end in ends if not end.signalled and end.code not in _NOT_OWN_FAILURES}
    silent = {end.rank for end in ends if end.signalled and cause.code == ExitCode.PEER_LOST}
    named = {end.rank for end in ends if cause.code not in _NOT_OWN_FAILURES} | silent
    return len(died | ({cause.rank} & named))


def by_launcher(processes: Mapping[str, int], reports: Mapping[str, Report]) -> dict[str, int]:
    """Returns how many processes of each launcher that has reported have failed.

    Also counts the ranks that the first launcher, which serves the ranks' group, reports as the cause. Their own
    launcher may have ended them before they ended by themselves: a rank may announce its failure first, become silent,
    or never join.

    Args:
      processes: number of processes of each launcher, in the order of ranks.
      reports: by launcher.
    """
    dead = {name: report.dead for name, report in reports.items()}
    owners = [name for name, count in processes.items() for _ in range(count)]
    blamed = _blamed(reports[owners[0]], owners) if owners[0] in reports else []
    for owner in dead:
        dead[owner] = max(dead[owner], blamed.count(owner))
    return dead


def _blamed(report: Report, owners: Sequence[str]) -> list[str]:
    """Returns the owner of each rank of another launcher that is the cause according to the first launcher.

    The first launcher counts its own ranks itself. With code 5, the rank that it names is one that was lost, not one
    that lost others. If ranks did not join in time, all of them are returned: otherwise each of them would delay one
    more attempt by the timeout.
    """
    cause = report.outcome
    if cause.code == ExitCode.PEER_LOST and cause.rank in report.absent:
        return [owners[rank] for rank in report.absent if 0 <= rank < len(owners)]
    if cause.rank is None or not 0 <= cause.rank < len(owners) or owners[cause.rank] == owners[0]:
        return []
    return [] if cause.code in _NOT_OWN_FAILURES and cause.code != ExitCode.PEER_LOST else [owners[cause.rank]]
