"""Exit codes of all commands, and their descriptions."""

import enum
import signal


class ExitCode(enum.IntEnum):
    """Exit code of a tfdist process, with the same meaning for every command and every rank."""

    DONE = 0
    FAILED = 1  # an unexpected error, or `verify` found a difference
    BAD_INPUT = 2
    NOT_FINITE = 3  # the loss became inf or NaN
    STALLED = 4
    PEER_LOST = 5
    OUT_OF_MEMORY = 6
    PREEMPTED = 75  # EX_TEMPFAIL: to be restarted


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.BAD_INPUT: "bad input",
    ExitCode.NOT_FINITE: "loss not finite",
    ExitCode.STALLED: "stalled",
    ExitCode.PEER_LOST: "a peer was lost",
    ExitCode.OUT_OF_MEMORY: "out of memory",
    ExitCode.PREEMPTED: "preempted",
}
SIGNALLED = 128  # as in a shell: 128 + number of the signal that ended the process


def is_loss(code: int) -> bool:
    """Returns whether the code says that something else ended a process: a signal, a lack of memory, or a lost peer.

    Args:
      code: an exit code in [0, 255].
    """
    return code > SIGNALLED or code in (ExitCode.PEER_LOST, ExitCode.OUT_OF_MEMORY)


def describe(code: int) -> str:
    """Returns `code 3 (loss not finite)`, `code 137 (killed by SIGKILL)`, or `code 42`.

    Args:
      code: an exit code in [0, 255].
    """
    if code > SIGNALLED and code - SIGNALLED in signal.valid_signals():
        return f"code {code} (killed by {signal.Signals(code - SIGNALLED).name})"
    meaning = MEANINGS.get(code)  # type: ignore[call-overload]  # an IntEnum equals its number
    return f"code {code} ({meaning})" if meaning else f"code {code}"
