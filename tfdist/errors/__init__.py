"""The errors raised by tfdist, the exit codes of its commands, and the interpretation of engines' exceptions.

Every error that a user can cause is defined here. `tfdist.cli.command` decides how errors are printed. `byte_sizes` and
`counts` have numbers as messages give them.
"""

from tfdist.errors.arguments import names_arguments, naming_arguments, naming_flags
from tfdist.errors.exceptions import (
    CheckpointError,
    CorruptCheckpointError,
    DesyncError,
    InputError,
    Interrupted,
    NotFiniteError,
    OutOfMemoryError,
    PeerLostError,
    Preempted,
    SpawnError,
    TfdistError,
    TrialError,
    WriteError,
    describe_error,
)
from tfdist.errors.exit_codes import ExitCode

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "DesyncError",
    "ExitCode",
    "InputError",
    "Interrupted",
    "NotFiniteError",
    "OutOfMemoryError",
    "PeerLostError",
    "Preempted",
    "SpawnError",
    "TfdistError",
    "TrialError",
    "WriteError",
    "describe_error",
    "names_arguments",
    "naming_arguments",
    "naming_flags",
]
