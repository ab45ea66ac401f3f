"""The errors raised by tfdist, the exit codes of its commands, and the interpretation of engines' exceptions.

`tfdist.horovod.errors` derives the errors that scripts of Horovod expect from those defined here. `tfdist.cli.command`
decides how errors are printed. `formatting` formats numbers in messages, and suggests names that resemble an unknown one.
"""

from tfdist.errors.exceptions import (
    CheckpointError,
    CorruptCheckpointError,
    DesyncError,
    ExitCode,
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
    names_arguments,
    naming_arguments,
    naming_flags,
)

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
