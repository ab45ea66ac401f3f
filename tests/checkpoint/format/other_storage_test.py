"""Checkpoints in a storage other than the file system."""

import numpy as np
import pytest

from tests.storage.mangled import registered
from tfdist.checkpoint.format import (
    Checkpoint,
    CorruptCheckpointError,
    TensorBlock,
    checkpoints_at,
    complete_checkpoints,
    damaged_checkpoints,
    lock,
    mark_damaged,
)
from tfdist.errors import CheckpointError, InputError
from tfdist.storage import path_of

HOME = "test://bucket/run/checkpoints"
LARGE = np.arange(3 << 20, dtype=np.float32)


@pytest.fixture(autouse=True)
def storage(tmp_path):
    return registered(tmp_path / "root")


def parts(rank: int) -> list[TensorBlock]:
    return [TensorBlock("w", (2 * len(LARGE),), (rank * len(LARGE),), LARGE + rank)]


def test_ranks_write_one_and_read_it(write, on_ranks, tmp_path, storage):
    paths = on_ranks(2, lambda group: write(HOME, parts(group.rank), group))
    assert set(map(str, paths)) == {f"{HOME}/step-000000120"}
    checkpoint = Checkpoint.open(str(paths[0]))
    assert checkpoint.read("w").tobytes() == np.concatenate([LARGE, LARGE + 1]).tobytes()
    checkpoint.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert {"create", "sync_directory", "rename", "open", "entries"} <= storage.calls


def test_the_newest_stay_and_damaged_ones_are_set_aside(write, storage):
    for step in (1, 2, 3):
        write(HOME, [TensorBlock.full("w", LARGE)], step=step, keep=2)
    write(HOME, [TensorBlock.full("w", LARGE)], step=3, values=2, keep=2)
    found = checkpoints_at("test://bucket/run")
    assert [path.name for path in found] == ["step-000000003", "step-000000002"]
    assert checkpoints_at(str(found[1])) == [found[1]]
    shard = found[0] / "shard-00000.safetensors"
    data = bytearray(storage.read(shard))
    data[-1] ^= 1
    storage.replace(shard, bytes(data))
    with pytest.raises(CorruptCheckpointError, match=f"{shard}: the hash of w does not match"):
        Checkpoint.open(found[0]).verify()
    moved = mark_damaged(found[0])
    assert complete_checkpoints(HOME) == [found[1]]
    assert damaged_checkpoints(path_of(HOME)) == [moved] == [path_of(f"{HOME}/step-000000003.damaged")]


def test_one_that_fails_leaves_nothing(write, storage):
    with pytest.raises(CheckpointError, match="do not have its number of elements"):
        write(HOME, parts(0))
    assert storage.entries(path_of(HOME)) == []


def test_one_process_writes(storage):
    storage.make_directory(path_of(HOME))
    with lock(HOME), pytest.raises(InputError, match=f"Received: {HOME}, which process .* is using"), lock(HOME):
        pass
