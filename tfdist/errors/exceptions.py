"""Errors, with their exit codes.

Every error that a user can cause is one of these classes, so that a command prints its message as one line and exits
with the right code.
"""

from tfdist.errors.exit_codes import MEANINGS, ExitCode


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
    """An output file of a run could not be written, because its disk is full or does not answer."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is corrupted.

    Attributes:
      path: path of the checkpoint, or of the file in it.
      problem: short description.
    """

    def __init__(self, path: object, problem: str):
        """Initializes with the attributes `path` and `problem`."""
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
        """Initializes with the attributes `rank` and `code`."""
        super().__init__(message)
        self.rank, self.code = rank, code


class TrialError(TfdistError):
    """A trial of a search failed, for a reason that says nothing about what is searched for.

    Attributes:
      exit_code: exit code of the process that failed.
    """

    def __init__(self, message: str, code: int):
        """Initializes with the attribute `exit_code`."""
        super().__init__(message)
        self.exit_code = code  # type: ignore[assignment]  # that of any program


class Preempted(TfdistError):
    """All ranks were asked to end, and have stopped at an agreed step and saved; the run should be restarted."""

    exit_code = ExitCode.PREEMPTED


class Interrupted(Preempted):
    """Like `Preempted`, by Ctrl-C at the terminal of this process; a command then exits with code 130, as in a shell."""


def describe_error(error: BaseException) -> str:
    """Returns the kind of an error, not its message: `loss not finite`, `interrupted`, or `failed`."""
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "interrupted"
    return MEANINGS[error.exit_code if isinstance(error, TfdistError) else ExitCode.FAILED]
