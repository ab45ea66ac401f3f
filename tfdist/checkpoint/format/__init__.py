"""The format of checkpoints: a directory with safetensors shards and a manifest, written atomically by all processes.

`manifest.py` and `shard.py` define the format. This package does not depend on TensorFlow.
"""

from tfdist.checkpoint.format.atomic_write import HostPlacement, commit, copy_holder
from tfdist.checkpoint.format.directory import (
    NoLock,
    checkpoints_at,
    clean_partial,
    damaged_checkpoints,
    lock,
    newest,
    newest_first,
    remove,
    set_aside,
    step_of,
)
from tfdist.checkpoint.format.reading import Checkpoint, LocalFiles, first_readable_checkpoint
from tfdist.checkpoint.format.shard import Part, shard_bytes, write_shard
from tfdist.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CorruptCheckpointError",
    "LocalFiles",
    "NoLock",
    "Part",
    "HostPlacement",
    "checkpoints_at",
    "clean_partial",
    "commit",
    "copy_holder",
    "first_readable_checkpoint",
    "lock",
    "newest",
    "newest_first",
    "remove",
    "set_aside",
    "damaged_checkpoints",
    "shard_bytes",
    "step_of",
    "write_shard",
]
