"""The errors that tfdist raises, the exit codes of its commands, and what the exceptions of engines mean for a run.

Every error a user can cause is defined here. How an error is printed is decided in `tfdist.cli.command`.
"""

from tfdist.errors.exceptions import (
    CheckpointError,
    Damaged,
    DesyncError,
    ExitCode,
    InputError,
    NotFiniteError,
    OutOfMemoryError,
    PeerLostError,
    Preempted,
    TfdistError,
    WriteError,
)

__all__ = [
    "CheckpointError",
    "Damaged",
    "DesyncError",
    "ExitCode",
    "InputError",
    "NotFiniteError",
    "OutOfMemoryError",
    "PeerLostError",
    "Preempted",
    "TfdistError",
    "WriteError",
]
