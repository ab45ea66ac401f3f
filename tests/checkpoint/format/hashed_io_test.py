"""Bytes go to files and back with their hashes."""

import hashlib
import os
import time

import numpy as np
import pytest

from tfdist.checkpoint.format import files
from tfdist.storage import FileSystem

SIZES = [
    0,
    1,
    files.CHUNK_BYTES,
    files.PIECE_BYTES - 1,
    files.PIECE_BYTES,
    files.PIECE_BYTES + 1,
    2 * files.PIECE_BYTES + 7,
]


def write(path, pieces: list[files.Piece], threads: int) -> list[str]:
    with FileSystem().create(path) as file:
        return files.write_hashed(file, pieces, threads)


def read(path, pieces: list[files.Piece], threads: int) -> list[str]:
    with FileSystem().open(path) as file:
        return files.read_hashed(file, pieces, threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_go_to_a_file_and_back_with_their_hashes(size, threads, tmp_path):
    values = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    cut = [values[at : at + files.PIECE_BYTES] for at in range(0, size, files.PIECE_BYTES)]
    expected = [hashlib.sha256(one.data).hexdigest() for one in cut]
    assert files.piece_count(size) == len(expected)
    assert write(tmp_path / "file", files.pieces(100, size, values), threads) == expected
    assert (tmp_path / "file").stat().st_size == (100 + size if size else 0)
    found = np.zeros_like(values)
    assert read(tmp_path / "file", files.pieces(100, size, found), threads) == expected
    assert found.tobytes() == values.tobytes()
    assert read(tmp_path / "file", files.pieces(100, size), threads) == expected


def test_the_system_may_write_and_read_less_than_it_was_given(tmp_path, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, into, at: preadv(descriptor, [into[0][:9]], at))
    expected = [hashlib.sha256(values.data).hexdigest()]
    assert write(tmp_path / "file", files.pieces(0, 1000, values), 1) == expected
    found = np.zeros_like(values)
    assert read(tmp_path / "file", files.pieces(0, 1000, found), 1) == expected
    assert found.tobytes() == values.tobytes()


def test_a_failure_ends_the_rest(tmp_path, monkeypatch):
    values = np.ones(40 * files.PIECE_BYTES, np.uint8)
    begun = []

    def fail(*_: object) -> int:
        begun.append(1)
        time.sleep(0.2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path / "file", files.pieces(0, values.nbytes, values), 2)
    assert len(begun) < 40
