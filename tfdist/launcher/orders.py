"""Messages between launchers and the job controller: orders and reports."""

import enum
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tfdist.errors import ExitCode
from tfdist.launcher.child import Child
from tfdist.launcher.job import Outcome


class OrderKind(enum.StrEnum):
    """What a launcher must do; the values are also the JSON."""

    WAIT = "wait"
    RUN = "run"
    STOP = "stop"
    OVER = "over"


class Order(NamedTuple):
    """The action of a launcher until the next order.

    Attributes:
      kind: wait; run an attempt, unless it has already run; stop it, after it has saved; or end, because the job is over.
      attempt: index of the attempt, beginning with 0.
      node: index of this launcher in the attempt.
      nodes: number of launchers of the attempt.
      processes: number of processes of this launcher.
      address: `host:port` of the launchers' group; empty for a single launcher.
      outcome: the reason to stop, or the outcome of the job.
      job_name: name of the job, the same in all attempts; see `new_job_name`.
    """

    kind: OrderKind
    attempt: int = 0
    node: int = 0
    nodes: int = 1
    processes: int = 0
    address: str = ""
    outcome: Outcome = Outcome(0)
    job_name: str = ""


class Report(NamedTuple):
    """The end of an attempt, as seen by one of its launchers.

    Attributes:
      outcome: outcome of the attempt.
      stopped: whether the end of this launcher was requested.
      failed_count: number of its processes that failed, except for failures caused by other processes.
      step: last step that one of its ranks has recorded, or None.
      final: whether one of its ranks has recorded that the job must not be restarted.
      absent: ranks that did not join the ranks' group in time, if this launcher serves the group.
    """

    outcome: Outcome
    stopped: bool = False
    failed_count: int = 0
    step: int | None = None
    final: bool = False
    absent: Sequence[int] = ()


_Message = TypeVar("_Message", Order, Report)


def new_job_name() -> str:
    """Returns a unique name for a new job: its start time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def encode(message: Order | Report) -> dict[str, Any]:
    """Encodes an order or a report as JSON, without the log of its outcome, which is a local file."""
    outcome = message.outcome
    return message._asdict() | {"outcome": [int(outcome.code), outcome.reason, outcome.rank]}


def decode(kind: type[_Message], fields: Mapping[str, Any]) -> _Message:
    """Decodes an order or a report."""
    return kind(**{**fields, "outcome": Outcome(*fields["outcome"])})


# Exit codes that do not count as failures of the process itself; a stall ends all processes.
_IGNORED_CODES = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.STALLED)


def count_local_failures(children: Collection[Child], cause: Outcome) -> int:
    """Returns the number of failed processes of a launcher, except for failures caused by other processes.

    The process that caused the failure may have been signaled after announcing its failure, or because it was silent.
    """
    failed_ranks = {child.rank for child in children if not child.signaled and child.code not in _IGNORED_CODES}
    is_failure, is_external_failure = cause.code not in _IGNORED_CODES, cause.code == ExitCode.PEER_LOST
    possible_causes = {child.rank for child in children if is_failure or (is_external_failure and child.signaled)}
    return len(failed_ranks | ({cause.rank} & possible_causes))


def failures_by_launcher(processes: Mapping[str, int], reports: Mapping[str, Report]) -> dict[str, int]:
    """Returns the number of failed processes of each launcher that has reported.

    Includes ranks that the first launcher, which serves the ranks' group, reports as the cause. Their launcher may have
    terminated them after they announced a failure, became silent or failed to join.
    """
    failures = {name: report.failed_count for name, report in reports.items()}
    owners = [name for name, count in processes.items() for _ in range(count)]
    failed_owners = _failed_owners(reports[owners[0]], owners) if owners[0] in reports else []
    for owner in failures:
        failures[owner] = max(failures[owner], failed_owners.count(owner))
    return failures


def _failed_owners(report: Report, owners: Sequence[str]) -> list[str]:
    """Returns the launchers of ranks that caused a failure, according to the first launcher's report; omits its own ranks.

    With code 5, the report names a lost rank. If the rank did not join in time, includes all ranks that did not: each of them
    would delay another attempt by the timeout.
    """
    cause = report.outcome
    if cause.code == ExitCode.PEER_LOST and cause.rank in report.absent:
        return [owners[rank] for rank in report.absent if 0 <= rank < len(owners)]
    if cause.rank is None or not 0 <= cause.rank < len(owners) or owners[cause.rank] == owners[0]:
        return []
    return [] if cause.code in _IGNORED_CODES and cause.code != ExitCode.PEER_LOST else [owners[cause.rank]]
