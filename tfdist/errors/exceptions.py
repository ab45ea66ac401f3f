"""Exit codes and the errors that carry them.

Every command ends with one of these codes; every error that a user can cause is one of these classes, so that a command
prints its message as one line and leaves with the right code.
"""

import enum
import os


class ExitCode(enum.IntEnum):
    """What the end of a tfdist process means; the same for every command and every rank."""

    DONE = 0
    FAILED = 1  # an unexpected error, or `verify` found a difference
    BAD_INPUT = 2
    NOT_FINITE = 3  # the loss became inf or NaN
    STALLED = 4
    PEER_LOST = 5
    OUT_OF_MEMORY = 6
    PREEMPTED = 75  # EX_TEMPFAIL: run me again


class TfdistError(Exception):
    """An error whose message says what happened, in one line, to the person who started the run."""

    exit_code = ExitCode.FAILED


class InputError(TfdistError, ValueError):
    """A flag, an environment variable, a file or an argument is wrong: the rule, what was received, the remedy."""

    exit_code = ExitCode.BAD_INPUT


class NotFiniteError(TfdistError):
    """The loss of a step is inf or NaN."""

    exit_code = ExitCode.NOT_FINITE


class PeerLostError(TfdistError):
    """Another rank of the job died, or did not come, or did not answer in time."""

    exit_code = ExitCode.PEER_LOST


class OutOfMemoryError(TfdistError):
    """The engine could not allocate memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class CheckpointError(TfdistError):
    """A checkpoint could not be written or read; those that are there already are as they were."""


class WriteError(TfdistError):
    """A file that a run writes as it goes could not be written: its disk is full, or does not answer."""


class Damaged(CheckpointError):
    """A checkpoint is not as it was written.

    Attributes:
      path: the checkpoint, or the file of it.
      problem: what is wrong, in a few words.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str):
        """Args: as the attributes."""
        problem = " ".join(problem.split())[:300]  # what a damaged file says of itself may have any length
        super().__init__(
            f"A checkpoint must be as it was written. Received: {os.fspath(path)}: {problem}. "
            "Continue from another one, or bring this one back from a copy."
        )
        self.path = path
        self.problem = problem


class DesyncError(TfdistError):
    """Replicas that must hold the same values do not."""


class Preempted(TfdistError):
    """All ranks have stopped at an agreed step and saved, because somebody asked this run to end: run it again."""

    exit_code = ExitCode.PREEMPTED
