"""Result of a job: its exit code, and the root cause among the exits of its processes."""

import dataclasses
import pathlib
import signal
from collections.abc import Sequence
from typing import Protocol

from tfdist.coordination import LostMember
from tfdist.coordination.group import NO_GOODBYE
from tfdist.errors import ExitCode, exit_codes


class ProcessEnd(Protocol):
    """How a process ended; implemented by `Child`."""

    rank: int
    code: int | None
    ended: float
    signalled: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
      code: exit code.
      reason: description, as a sentence without its full stop; empty for success.
      rank: rank that is the cause; None if there is none, or it is unknown on this node.
      log: log of that rank, if it ran here.
    """

    code: int
    reason: str = ""
    rank: int | None = None
    log: pathlib.Path | None = None


SUCCESS = Outcome(ExitCode.DONE)
# Codes with which a process ends by a signal: a consequence, if it is the launcher's.
_OF_SIGNALS = (exit_codes.SIGNALLED + signal.SIGINT, exit_codes.SIGNALLED + signal.SIGTERM)


def root_cause(ends: Sequence[ProcessEnd], loss: LostMember | None = None) -> Outcome:
    """Finds the process whose end caused the others'.

    Processes that the launcher has signalled, or that ended because they lost a peer, are consequences. A preempted
    process ended as requested, and is the cause only if nothing else went wrong. Of the remaining processes, the first
    to end is the cause, unless the group's loss says otherwise: an engine's error can end its process before the one
    that caused it, and a suspended or hanging process does not end at all.

    Args:
      ends: ends of the processes; those still running have no code.
      loss: the first loss in the ranks' group.

    Returns:
      The cause; success if every process that has ended did so with code 0 or after a signal from the launcher.
    """
    if loss and loss.code not in (None, ExitCode.DONE, ExitCode.PEER_LOST, *_OF_SIGNALS):
        return _left(loss)
    failed = sorted((end for end in ends if end.code and not end.signalled), key=lambda end: end.ended)
    if loss and loss.code is None and _is_gone(loss, ends, failed):
        return Outcome(ExitCode.PEER_LOST, str(loss), loss.rank)
    known = [end for end in failed if end.code != ExitCode.PEER_LOST] or failed
    causes = [end for end in known if end.code != ExitCode.PREEMPTED] or known
    if not causes:
        return _left(loss) if loss and loss.code == ExitCode.PEER_LOST else SUCCESS
    first = next((end for end in causes if loss and end.rank == loss.rank), causes[0])
    assert first.code is not None
    return Outcome(first.code, f"rank {first.rank} ended with {exit_codes.describe(first.code)}", first.rank)


def _left(loss: LostMember) -> Outcome:
    """Returns the outcome if a member that has said goodbye is the cause."""
    assert loss.code is not None
    return Outcome(loss.code, f"{loss.noun} {loss.rank} {loss.reason.rstrip('.')}", loss.rank)


def _is_gone(loss: LostMember, ends: Sequence[ProcessEnd], failed: Sequence[ProcessEnd]) -> bool:
    """Returns whether a member that disappeared without a goodbye is the cause.

    Its process is still running, or belongs to another node and all failures here are lost peers. A member whose
    connection closed may be about to end normally as long as no process has failed.
    """
    end = next((end for end in ends if end.rank == loss.rank), None)
    if end and end.code is not None:
        return False
    is_first = end is not None or all(other.code == ExitCode.PEER_LOST for other in failed)
    return is_first and (bool(failed) or loss.reason != NO_GOODBYE)
