"""A checkpoint that has been changed in any way since it was written is never loaded."""

import errno
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, TensorBlock
from tfdist.errors import CheckpointError, InputError

FILES = ("manifest.json", "shard-00000.safetensors", "shard-00001.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, write, on_ranks) -> Path:
    """A small checkpoint written by two ranks."""

    def parts(rank: int) -> list[TensorBlock]:
        values = np.arange(12, dtype=np.float32).reshape(3, 4) + rank
        own = [
            TensorBlock("kernel", (6, 4), (3 * rank, 0), values),
            TensorBlock.full(f"moment/{rank}", np.ones(5, np.int8)),
        ]
        return own if rank else [*own, TensorBlock.full("iterations", np.array(120))]

    directory = tmp_path_factory.mktemp("checkpoints")
    [path, _] = on_ranks(2, lambda group: write(directory, parts(group.rank), group))
    return path


@pytest.fixture
def path(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def load(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.tensors:
        checkpoint.read(name)


def verify(path: Path) -> None:
    Checkpoint.open(path).verify()


def assert_damaged(path: Path, *words: str) -> None:
    for look in (load, verify):
        with pytest.raises(CorruptCheckpointError) as caught:
            look(path)
        message = str(caught.value)
        assert "\n" not in message
        for word in (str(path), *words):
            assert word in message


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(name, path):
    chosen, file = random.Random(name), path / name
    data = file.read_bytes()
    first = [0, 1, 7, 8, len(data) - 1]  # in the length, and at the edges of the header
    for at in [*first, *chosen.choices(range(len(data)), k=50)]:
        changed = bytearray(data)
        changed[at] ^= 1 << chosen.randrange(8)
        file.write_bytes(changed)
        assert_damaged(path, name)
    file.write_bytes(data)
    load(path)
    verify(path)
    assert sorted(file.name for file in path.iterdir()) == list(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_ends_too_early_is_found(name, path):
    data = (path / name).read_bytes()
    for length in [0, 1, 7, 8, len(data) - 1, *random.Random(name).choices(range(len(data)), k=15)]:
        (path / name).write_bytes(data[:length])
        assert_damaged(path, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [b"\0", b"\n", b" ", b"}"])
def test_a_byte_too_many_is_found(name, more, path):
    with open(path / name, "ab") as file:
        file.write(more)
    assert_damaged(path, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda file, whole: None, "it is missing"),
        (lambda file, whole: file.symlink_to(whole / file.name), "it is a link"),  # which is not followed
        (lambda file, whole: os.mkfifo(file), "it is not a regular file"),  # a pipe is not waited for
        (lambda file, whole: file.mkdir(), "it is not a regular file"),
    ],
    ids=["nothing", "link", "pipe", "directory"],
)
def test_what_is_in_the_place_of_a_file_is_named(put, said, name, path, whole):
    (path / name).unlink()
    put(path / name, whole)
    assert_damaged(path, name, said)


def test_another_ranks_shard_is_not_taken_for_ones_own(path):
    (path / FILES[1]).write_bytes((path / FILES[2]).read_bytes())
    assert_damaged(path, FILES[1])


def test_a_shard_that_shrinks_after_it_was_opened_is_found(path):
    checkpoint = Checkpoint.open(path)
    os.truncate(path / FILES[1], (path / FILES[1]).stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="it is too short"):
        checkpoint.verify()


def test_a_directory_without_anything_is_damaged(tmp_path):
    assert_damaged(tmp_path, "manifest.json: it is missing")


@pytest.mark.parametrize(
    ("number", "is_damage", "message"),
    [
        (errno.ESTALE, False, "shard-00000.safetensors: Stale file handle"),
        (errno.EIO, True, "shard-00000.safetensors.*the disk cannot read it"),
    ],
)
def test_what_the_system_refuses_is_no_damage_but_what_the_disk_has_lost_is(
    number, is_damage, message, path, monkeypatch
):
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    checkpoint = Checkpoint.open(path)
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.verify()
    assert isinstance(caught.value, CorruptCheckpointError) == is_damage
    assert is_damage or not isinstance(caught.value, InputError)
