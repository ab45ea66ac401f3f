"""The storage of checkpoints: NumPy arrays in, the same arrays out, or an error that says what is not as it was.

    commit(group, directory, parts)   all processes write one checkpoint, whole or not at all
    Checkpoint.open(path).read(name)  nothing is returned whose hash is wrong

A checkpoint is a directory of safetensors shards and a manifest; `manifest.py` and `shard.py` have the format. What the state
of a run is, is not known here, and TensorFlow is not imported.
"""

from tfdist.checkpoint.storage.atomic_write import commit
from tfdist.checkpoint.storage.background import BackgroundWriter
from tfdist.checkpoint.storage.directory import (
    checkpoints_at,
    clean_partial,
    newest,
    remove,
    set_aside,
    set_aside_in,
    step_of,
)
from tfdist.checkpoint.storage.locking import Holder, NoLock, lock, unlocked
from tfdist.checkpoint.storage.multi_host import Spread, keeper
from tfdist.checkpoint.storage.part import Part
from tfdist.checkpoint.storage.reading import Checkpoint, Held
from tfdist.checkpoint.storage.shard import shard_bytes, write_shard
from tfdist.errors import CheckpointError, Damaged

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointError",
    "Damaged",
    "Held",
    "Holder",
    "NoLock",
    "Part",
    "Spread",
    "checkpoints_at",
    "clean_partial",
    "commit",
    "keeper",
    "lock",
    "newest",
    "remove",
    "set_aside",
    "set_aside_in",
    "shard_bytes",
    "step_of",
    "unlocked",
    "write_shard",
]
