"""Writes and reads bytes while computing their hashes, in several threads.

A block is hashed in pieces of fixed size, each with its own SHA-256, so that even a single large tensor is divided
between threads. The expensive operations (hashing, reading, writing) release the GIL, so that training continues
meanwhile.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tfdist.storage import NewFile, StoredFile

PIECE = 4 << 20  # bytes of a block with one hash; part of the format
CHUNK = 1 << 18  # bytes of a piece that are hashed while they are in the processor's cache


class Piece(NamedTuple):
    """A range of a file with one hash.

    Attributes:
      position: position in the file.
      size: number of bytes, at most `PIECE`.
      memory: source or destination of the bytes; None to discard them.
    """

    position: int
    size: int
    memory: memoryview | None


def pieces(position: int, size: int, values: np.ndarray | None = None) -> list[Piece]:
    """Splits a block into pieces.

    Args:
      position: position of the block in the file.
      size: size of the block in bytes.
      values: the block, C-contiguous; None if it is not in memory.
    """
    memory = None if values is None else values.reshape(-1).view(np.uint8).data
    return [
        Piece(position + at, min(PIECE, size - at), None if memory is None else memory[at : at + PIECE])
        for at in range(0, size, PIECE)
    ]


def count(size: int) -> int:
    """Returns the number of pieces of a block of `size` bytes."""
    return -(-size // PIECE)


def write(file: NewFile, each: Sequence[Piece], threads: int) -> list[str]:
    """Writes pieces of a file; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as raised by the storage; pieces that have not been started are not written.
    """
    return _over(threads, functools.partial(_write, file), each)


def read(file: StoredFile, each: Sequence[Piece], threads: int) -> list[str]:
    """Reads pieces of a file, into memory if they have any; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as raised by the storage.
      EOFError: the file is too short.
    """
    return _over(threads, functools.partial(_read, file), each)


def _over(threads: int, work: Callable[[Piece], str], each: Sequence[Piece]) -> list[str]:
    if len(each) < 2:  # most tensors are small, and starting threads takes longer than hashing them
        return [work(piece) for piece in each]
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        return list(pool.map(work, each))  # cancels the rest if one fails


def _write(file: NewFile, piece: Piece) -> str:
    assert piece.memory is not None
    found = hashlib.sha256()
    for begin in range(0, piece.size, CHUNK):
        chunk = piece.memory[begin : begin + CHUNK]
        found.update(chunk)
        file.write(chunk, piece.position + begin)
    if piece.size == PIECE:
        # So that its writeback starts while the next piece is hashed, not only after the last.
        file.is_complete(piece.position, piece.size)
    return found.hexdigest()


def _read(file: StoredFile, piece: Piece) -> str:
    found = hashlib.sha256()
    scratch = memoryview(bytearray(min(CHUNK, piece.size) if piece.memory is None else 0))
    done = 0
    while done < piece.size:
        left = min(CHUNK, piece.size - done)
        into = scratch[:left] if piece.memory is None else piece.memory[done : done + left]
        got = file.read_into(into, piece.position + done)
        if not got:
            raise EOFError
        found.update(into[:got])
        done += got
    return found.hexdigest()
