"""Errors, their exit codes, and the translation of flags into arguments in messages.

Every error that a user can cause is one of these classes: a command prints its message as one line and exits with its code.
"""

import contextlib
import contextvars
import enum
import functools
import re
import signal
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

SIGNAL_OFFSET = 128  # as in a shell: 128 + number of the signal that ended the process
P = ParamSpec("P")
R = TypeVar("R")
_FLAG = re.compile(r"(?<![\w-])--(?=[a-z])")
_in_command = contextvars.ContextVar("in_command", default=False)


class ExitCode(enum.IntEnum):
    """Exit code of a tfdist process, with the same meaning for every command and every rank."""

    DONE = 0
    FAILED = 1  # an unexpected error, or `verify` found a difference
    BAD_INPUT = 2
    NOT_FINITE = 3  # the loss became inf or NaN
    STALLED = 4
    PEER_LOST = 5
    OUT_OF_MEMORY = 6
    PREEMPTED = 75  # EX_TEMPFAIL: the run should be restarted


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


def is_external_failure(code: int) -> bool:
    """Returns whether a process failed for an external reason: a signal, lack of memory, or a lost peer.

    Args:
      code: an exit code in [0, 255].
    """
    return code > SIGNAL_OFFSET or code in (ExitCode.PEER_LOST, ExitCode.OUT_OF_MEMORY)


def describe(code: int) -> str:
    """Returns `code 3 (loss not finite)`, `code 137 (killed by SIGKILL)`, or `code 42`.

    Args:
      code: an exit code in [0, 255].
    """
    if code > SIGNAL_OFFSET and code - SIGNAL_OFFSET in signal.valid_signals():
        return f"code {code} (killed by {signal.Signals(code - SIGNAL_OFFSET).name})"
    meaning = MEANINGS.get(code)  # type: ignore[call-overload]  # an IntEnum equals its number
    return f"code {code} ({meaning})" if meaning else f"code {code}"


class TfdistError(Exception):
    """An error with a one-line message for the user."""

    exit_code = ExitCode.FAILED


class InputError(TfdistError, ValueError):
    """A flag, environment variable, file or argument is invalid; the message has the rule, value and remedy."""

    exit_code = ExitCode.BAD_INPUT


class NotFiniteError(TfdistError):
    """The loss of a step is inf or NaN."""

    exit_code = ExitCode.NOT_FINITE


class PeerLostError(TfdistError):
    """Another rank of the job failed, did not join, or did not answer in time."""

    exit_code = ExitCode.PEER_LOST


class OutOfMemoryError(TfdistError):
    """The engine could not allocate memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class CheckpointError(TfdistError):
    """A checkpoint could not be written or read; existing ones are unchanged."""


class WriteError(TfdistError):
    """An output file of a run could not be written, for example because the disk is full."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is corrupted.

    Attributes:
      path: path of the checkpoint, or of the file in it.
      problem: short description.
    """

    def __init__(self, path: object, problem: str):
        problem = " ".join(problem.split())[:300]  # a message from a corrupted file may have any length
        super().__init__(
            f"A checkpoint must be undamaged. Received: {path}: {problem}. Continue from another one, or restore this "
            "one from a copy."
        )
        self.path = path
        self.problem = problem


class DesyncError(TfdistError):
    """Replicas that must have the same values do not."""


class SpawnError(TfdistError):
    """A process of `tfdist.spawn` ended without a result.

    Attributes:
      rank: rank of the process; None if no process has failed by itself.
      code: its exit code, 128 + N if signal N ended it.
    """

    def __init__(self, message: str, rank: int | None, code: int):
        super().__init__(message)
        self.rank, self.code = rank, code


class TrialError(TfdistError):
    """A trial of a search failed for a reason that is unrelated to the searched value.

    Attributes:
      exit_code: exit code of the process that failed.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.exit_code = code  # type: ignore[assignment]  # may be that of any program


class Preempted(TfdistError):
    """All ranks stopped at the same step on request, and saved a checkpoint; the run should be restarted."""

    exit_code = ExitCode.PREEMPTED


class Interrupted(Preempted):
    """Like `Preempted`, but requested by Ctrl-C; a command exits with code 130, as in a shell."""


def describe_error(error: BaseException) -> str:
    """Returns the kind of an error, not its message: `loss not finite`, `interrupted`, or `failed`."""
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "interrupted"
    return MEANINGS[error.exit_code if isinstance(error, TfdistError) else ExitCode.FAILED]


# Errors of the library name arguments (`batch_size=7`); errors of commands name flags (`--batch_size=7`).
# Messages are written with flags; public functions of the library translate them.


def naming_flags() -> contextlib.AbstractContextManager[None]:
    """Returns the context of a command, in which errors name flags."""
    return _name_flags(True)


def naming_arguments() -> contextlib.AbstractContextManager[None]:
    """Returns the context of a user's program that a command runs, in which errors name arguments."""
    return _name_flags(False)


@contextlib.contextmanager
def _name_flags(uses_flags: bool) -> Iterator[None]:
    token = _in_command.set(uses_flags)
    try:
        yield
    finally:
        _in_command.reset(token)


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function of the library, whose errors name arguments unless a command calls it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TfdistError as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (with_argument_names(error.args[0]), *error.args[1:])
            raise

    return call


def with_argument_names(message: str) -> str:
    """Replaces flags in a message by arguments, unless in a command. Quoted commands keep their flags."""
    if _in_command.get():
        return message
    parts = message.split("`")
    return "`".join(part if index % 2 else _FLAG.sub("", part) for index, part in enumerate(parts))
