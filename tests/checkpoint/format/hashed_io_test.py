"""Bytes go to files and back with their hashes."""

import hashlib
import os
import time

import numpy as np
import pytest

from tfdist.checkpoint.format import files
from tfdist.storage import FileSystem

SIZES = [0, 1, files.CHUNK, files.PIECE - 1, files.PIECE, files.PIECE + 1, 2 * files.PIECE + 7]


STORAGE = FileSystem()


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes pieces to a new file and returns their hashes."""

    def written(each: list[files.Piece], threads: int) -> list[str]:
        with STORAGE.create(tmp_path / "file") as file:
            return files.write_hashed(file, each, threads)

    return written


@pytest.fixture
def read(tmp_path):
    """Returns a function that reads pieces of the file and returns their hashes."""

    def found(each: list[files.Piece], threads: int) -> list[str]:
        with STORAGE.open(tmp_path / "file") as file:
            return files.read_hashed(file, each, threads)

    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_go_to_a_file_and_back_with_their_hashes(size, threads, write, read, tmp_path):
    values = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    cut = [values[at : at + files.PIECE] for at in range(0, size, files.PIECE)]
    expected = [hashlib.sha256(one.data).hexdigest() for one in cut]
    assert files.piece_count(size) == len(expected)
    assert write(files.pieces(100, size, values), threads) == expected
    assert (tmp_path / "file").stat().st_size == (100 + size if size else 0)
    found = np.zeros_like(values)
    assert read(files.pieces(100, size, found), threads) == expected
    assert found.tobytes() == values.tobytes()
    assert read(files.pieces(100, size), threads) == expected


def test_the_system_may_write_and_read_less_than_it_was_given(write, read, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, into, at: preadv(descriptor, [into[0][:9]], at))
    expected = [hashlib.sha256(values.data).hexdigest()]
    assert write(files.pieces(0, 1000, values), 1) == expected
    found = np.zeros_like(values)
    assert read(files.pieces(0, 1000, found), 1) == expected
    assert found.tobytes() == values.tobytes()


def test_a_failure_ends_the_rest(write, monkeypatch):
    values = np.ones(40 * files.PIECE, np.uint8)
    begun = []

    def fail(*_: object) -> int:
        begun.append(1)
        time.sleep(0.2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space left on device"):
        write(files.pieces(0, values.nbytes, values), 2)
    assert len(begun) < 40


def test_the_end_of_a_file_is_an_error(read, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EOFError):
        read(files.pieces(0, 10, np.zeros(10, np.uint8)), 1)
