"""How a job ended, and why: the root cause among the ends of its processes."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Protocol

from tfdist.coordination import Loss
from tfdist.coordination.group import NO_GOODBYE
from tfdist.errors import ExitCode, exit_codes


class End(Protocol):
    """How a process ended, as `Child` tells it."""

    rank: int
    code: int | None
    ended: float
    signalled: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
      code: the exit code that says so.
      reason: in words, as a sentence without its full stop; empty for success.
      rank: whose fault it is; None if nobody's, or another node's.
      log: of that rank, where it ran here.
    """

    code: int
    reason: str = ""
    rank: int | None = None
    log: pathlib.Path | None = None


SUCCESS = Outcome(ExitCode.DONE)


def root_cause(ends: Sequence[End], loss: Loss | None = None) -> Outcome:
    """Finds out which process's end caused the others'.

    A process that the launcher has signalled, and one that ended because it lost a peer, are consequences; one that was
    preempted did as it was asked to, and is the cause only where nothing else went wrong. Of the others the first is the
    cause, unless the group knows better: an engine's error can end its process before the one that caused it has ended, and
    one that is stopped or hangs does not end at all.

    Args:
      ends: of the processes; those that still run have no code.
      loss: the first loss that the ranks' group knows of.

    Returns:
      The cause; success if every process that has ended has done so with code 0, or after a signal of the launcher's.
    """
    if loss and loss.code not in (None, ExitCode.DONE, ExitCode.PEER_LOST):
        assert loss.code is not None
        return Outcome(loss.code, f"{loss.noun} {loss.rank} {loss.reason.rstrip('.')}", loss.rank)
    failed = sorted((end for end in ends if end.code and not end.signalled), key=lambda end: end.ended)
    if loss and loss.code is None and _is_gone(loss, ends, failed):
        return Outcome(ExitCode.PEER_LOST, str(loss), loss.rank)
    known = [end for end in failed if end.code != ExitCode.PEER_LOST] or failed
    causes = [end for end in known if end.code != ExitCode.PREEMPTED] or known
    if not causes:
        return SUCCESS
    first = next((end for end in causes if loss and end.rank == loss.rank), causes[0])
    assert first.code is not None
    return Outcome(first.code, f"rank {first.rank} ended with {exit_codes.describe(first.code)}", first.rank)


def _is_gone(loss: Loss, ends: Sequence[End], failed: Sequence[End]) -> bool:
    """Whether a member that went without a word is the cause, and no end of its own says more.

    Its process still runs, or is another node's, where all that fails here fails as it has lost a peer. One whose connection
    closed may be about to end well, as long as nobody misses it.
    """
    end = next((end for end in ends if end.rank == loss.rank), None)
    if end and end.code is not None:
        return False
    is_first = end is not None or all(other.code == ExitCode.PEER_LOST for other in failed)
    return is_first and (bool(failed) or loss.reason != NO_GOODBYE)
