"""Exit codes and the errors that carry them.

Every command ends with one of these codes; every error that a user can cause is one of these classes, so that a command
prints its message as one line and leaves with the right code.
"""

import enum


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
