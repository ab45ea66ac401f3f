"""The format of checkpoints: a directory with safetensors shards and a manifest, written atomically by all processes.

`manifest.py` and `shard.py` define the format. This package does not depend on TensorFlow.
"""

from tfdist.checkpoint.format.atomic_write import HostPlacement, copy_holder, write_checkpoint
from tfdist.checkpoint.format.directory import (
    LockError,
    checkpoints_at,
    complete_checkpoints,
    damaged_checkpoints,
    lock,
    mark_damaged,
    newest_first,
    remove,
    remove_remnants,
    step_of,
)
from tfdist.checkpoint.format.reading import Checkpoint, LocalFiles, first_readable_checkpoint
from tfdist.checkpoint.format.shard import TensorBlock, shard_bytes, write_shard
from tfdist.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CorruptCheckpointError",
    "LocalFiles",
    "LockError",
    "TensorBlock",
    "HostPlacement",
    "checkpoints_at",
    "remove_remnants",
    "write_checkpoint",
    "copy_holder",
    "first_readable_checkpoint",
    "lock",
    "complete_checkpoints",
    "newest_first",
    "remove",
    "mark_damaged",
    "damaged_checkpoints",
    "shard_bytes",
    "step_of",
    "write_shard",
]
