"""The format of checkpoints: NumPy arrays are written, and read back unchanged or with an error about the corrupted part.

    commit(group, directory, parts)   all processes write one checkpoint, completely or not at all
    Checkpoint.open(path).read(name)  data is only returned after its hash has been verified

A checkpoint is a directory with safetensors shards and a manifest; `manifest.py` and `shard.py` define the format. This
package does not depend on the contents of a run's state, nor on TensorFlow. Files are accessed through
`tfdist.storage`.
"""

from tfdist.checkpoint.format.atomic_write import BackgroundWriter, HostPlacement, commit, copy_holder
from tfdist.checkpoint.format.directory import (
    Holder,
    NoLock,
    checkpoints_at,
    clean_partial,
    lock,
    newest,
    newest_first,
    remove,
    set_aside,
    set_aside_in,
    step_of,
)
from tfdist.checkpoint.format.reading import Checkpoint, LocalFiles, first_readable
from tfdist.checkpoint.format.shard import Part, shard_bytes, write_shard
from tfdist.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointError",
    "CorruptCheckpointError",
    "LocalFiles",
    "Holder",
    "NoLock",
    "Part",
    "HostPlacement",
    "checkpoints_at",
    "clean_partial",
    "commit",
    "copy_holder",
    "first_readable",
    "lock",
    "newest",
    "newest_first",
    "remove",
    "set_aside",
    "set_aside_in",
    "shard_bytes",
    "step_of",
    "write_shard",
]
