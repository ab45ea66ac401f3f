"""Checkpoints on hosts without a shared directory: if one host is lost, the others have all data."""

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.damaging import flip_last
from tfdist.checkpoint.format import (
    Checkpoint,
    HostPlacement,
    TensorBlock,
    atomic_write,
    complete_checkpoints,
    copy_holder,
    shard_bytes,
)
from tfdist.coordination import LocalGroup
from tfdist.errors import CheckpointError, CorruptCheckpointError
from tfdist.storage import FileSystem

HOSTS = [[0, 1], [2, 3], [4]]
WEIGHTS = np.arange(12.0).reshape(3, 4)
SIZE = 5


def own(rank: int) -> list[TensorBlock]:
    """Returns the parts that only this rank has: its row and, on rank 0, another tensor."""
    row = TensorBlock("error", (SIZE, 3), (rank, 0), np.full((1, 3), rank, np.float32))
    return [row, TensorBlock.full("seed", np.arange(2, dtype=np.uint32))] if rank == 0 else [row]


def host_by_rank(rank: int) -> int:
    return next(number for number, host in enumerate(HOSTS) if rank in host)


def written(tmp_path, write, on_ranks, replicated=lambda rank: [TensorBlock.full("w", WEIGHTS)], **given) -> list:
    """Writes a checkpoint on three hosts; the copies for other hosts are passed directly."""

    def one(group):
        copies = {rank: shard_bytes(own(rank)) for rank in range(SIZE) if copy_holder(rank, HOSTS) == group.rank}
        first = any(host[0] == group.rank for host in HOSTS)
        over = HostPlacement(HOSTS, replicated(group.rank) if first else (), copies)
        said, target = {"rank": group.rank}, place(tmp_path, group.rank)
        return write(target, own(group.rank), group, placement=over, values=said, flags=said, **given)

    return on_ranks(SIZE, one)


def place(tmp_path: Path, rank: int) -> Path:
    return tmp_path / f"host{host_by_rank(rank)}"


def whole(paths: list[Path], target: Path) -> Checkpoint:
    """Returns the checkpoint with the files of several hosts in one directory."""
    for path in paths:
        shutil.copytree(path, target, dirs_exist_ok=True)
    return Checkpoint.open(target)


def test_the_next_host_keeps_copies():
    assert [copy_holder(rank, HOSTS) for rank in range(SIZE)] == [2, 3, 4, 4, 0]
    assert [copy_holder(rank, [[0], [1, 2]]) for rank in range(3)] == [1, 0, 0]
    assert [copy_holder(rank, [[0, 2], [1, 3]]) for rank in range(4)] == [1, 0, 3, 2]


def test_every_host_has_the_manifest_and_without_one_nothing_is_lost(tmp_path, write, on_ranks):
    paths = written(tmp_path, write, on_ranks)
    assert paths == [place(tmp_path, rank) / "step-000000120" for rank in range(SIZE)]
    hosts = sorted(set(paths))
    assert len({(path / "manifest.json").read_bytes() for path in hosts}) == 1
    replicated = "shard-00005.safetensors"
    assert [sorted(int(file.name[6:11]) for file in path.glob("shard-*")) for path in hosts] == [
        [0, 1, 4, 5],
        [0, 1, 2, 3, 5],
        [2, 3, 4, 5],
    ]
    assert len({(path / replicated).read_bytes() for path in hosts}) == 1
    for number, left in enumerate(itertools.combinations(hosts, 2)):
        checkpoint = whole(list(left), tmp_path / f"whole{number}")
        checkpoint.verify()
        assert checkpoint.read("w").tolist() == WEIGHTS.tolist()
        assert checkpoint.read("error")[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert (checkpoint.values, checkpoint.flags) == ({"rank": 0}, {"rank": 0})


def test_what_a_host_has_is_told_by_every_byte(tmp_path, write, on_ranks):
    path, *_ = written(tmp_path, write, on_ranks)
    held = Checkpoint.local_files(path)
    names = [f"shard-{number:05d}.safetensors" for number in range(SIZE + 1)]
    assert list(held.sizes) == sorted(held.sizes, key=[*names, "manifest.json"].index)
    assert sorted(held.sizes) == sorted([*names, "manifest.json"])
    assert sorted(held.intact_names) == sorted([names[0], names[1], names[4], names[5], "manifest.json"])
    assert all((path / name).stat().st_size == held.sizes[name] for name in held.intact_names)
    with pytest.raises(CorruptCheckpointError, match=r"shard-0000[23].*missing"):
        Checkpoint.open(path)
    for name in (names[1], names[5]):
        flip_last(path / name)
        assert set(held.intact_names) - set(Checkpoint.local_files(path).intact_names) == {name}
        held = Checkpoint.local_files(path)


def test_hosts_that_hold_other_bits_write_nothing(tmp_path, write, on_ranks):
    def drifted(rank: int) -> list[TensorBlock]:
        values = WEIGHTS.copy()
        values.reshape(-1).view(np.uint8)[5] ^= rank == 2
        return [TensorBlock.full("b", WEIGHTS), TensorBlock.full("w", values)]

    found = written(tmp_path, write, on_ranks, drifted)
    assert {type(error) for error in found} == {CheckpointError}
    assert "rank 0: w differs between rank 2 and rank 0; see --check_sync_every." in str(found[0])
    assert len({str(error) for error in found}) == 1
    assert [complete_checkpoints(place(tmp_path, rank)) for rank in range(SIZE)] == [[]] * SIZE


@pytest.mark.parametrize("rank", [0, 3, 4])
def test_one_that_cannot_write_is_told_to_all(rank, tmp_path, write, on_ranks, monkeypatch):
    create = FileSystem.create

    def full(storage: FileSystem, path: Path):
        if path.name == f"shard-{rank:05d}.safetensors" and path.parent.parent == place(tmp_path, rank):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(storage, path)

    monkeypatch.setattr(FileSystem, "create", full)
    found = written(tmp_path, write, on_ranks)
    assert {type(error) for error in found} == {CheckpointError}
    assert f"rank {rank}: [Errno 28] No space left on device" in str(found[0])
    assert [list(place(tmp_path, one).glob(".*")) for one in range(SIZE)] == [[]] * SIZE


def test_only_the_newest_stay_on_every_host(tmp_path, write, on_ranks):
    for step in (10, 20, 30):
        written(tmp_path, write, on_ranks, step=step)
    kept = {tuple(path.name for path in complete_checkpoints(place(tmp_path, rank))) for rank in range(SIZE)}
    assert kept == {("step-000000030", "step-000000020")}


def test_all_that_is_said_has_the_deadline(tmp_path, write):
    deadlines = set()

    class Alone(LocalGroup):
        def gather(self, name, value, deadline=60.0):
            deadlines.add(deadline)
            return super().gather(name, value, deadline)

    write(tmp_path, [], Alone(), placement=HostPlacement([[0]], [TensorBlock.full("w", WEIGHTS)]), deadline=77.0)
    assert deadlines == {77.0}


def test_an_index_of_any_length_is_told(on_ranks, monkeypatch):
    monkeypatch.setattr(atomic_write, "_MAX_MESSAGE_LENGTH", 100)
    values = [{"rank": 0}, np.random.default_rng(0).random(400).tolist(), "", None]
    texts = [json.dumps(value) for value in values]
    assert on_ranks(4, lambda group: atomic_write._gather_text(group, "index", texts[group.rank], 60.0)) == [texts] * 4
