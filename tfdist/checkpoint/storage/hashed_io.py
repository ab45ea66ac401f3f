"""Bytes to a file and back, hashed on the way, in several threads.

A block is hashed in pieces of fixed size, each with a SHA-256 of its own, so that the threads share even one large tensor.
What takes long (hashing, reading, writing) holds no interpreter lock: training goes on beside it.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tfdist.checkpoint.storage import files

PIECE = 4 << 20  # of a block; part of the format
CHUNK = 1 << 18  # of a piece: is hashed while it is in the processor's cache


class Piece(NamedTuple):
    """Bytes of a file that have one hash.

    Attributes:
      descriptor: of the open file.
      position: in the file.
      size: in bytes, at most `PIECE`.
      memory: where the bytes are, or shall be; None for nowhere.
    """

    descriptor: int
    position: int
    size: int
    memory: memoryview | None


def pieces(descriptor: int, position: int, size: int, values: np.ndarray | None = None) -> list[Piece]:
    """The pieces of a block.

    Args:
      descriptor: of the open file.
      position: of the block in the file.
      size: of the block in bytes.
      values: the block, contiguous in C's order; None if it is nowhere in memory.
    """
    memory = None if values is None else values.reshape(-1).view(np.uint8).data
    return [
        Piece(descriptor, position + at, min(PIECE, size - at), None if memory is None else memory[at : at + PIECE])
        for at in range(0, size, PIECE)
    ]


def count(size: int) -> int:
    """How many pieces a block of so many bytes has."""
    return -(-size // PIECE)


def write(each: Sequence[Piece], threads: int) -> list[str]:
    """Writes pieces; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as the system says; what is not begun yet is not written any more.
    """
    return _over(threads, _write, each)


def read(each: Sequence[Piece], threads: int) -> list[str]:
    """Reads pieces, into memory where they have some; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as the system says.
      EOFError: the file ends too early.
    """
    return _over(threads, _read, each)


def _over(threads: int, work: Callable[[Piece], str], each: Sequence[Piece]) -> list[str]:
    if len(each) < 2:  # most tensors are small, and starting threads takes longer than hashing them
        return [work(piece) for piece in each]
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        return list(pool.map(work, each))  # which cancels the rest when one fails


def _write(piece: Piece) -> str:
    assert piece.memory is not None
    found = hashlib.sha256()
    for begin in range(0, piece.size, CHUNK):
        chunk = piece.memory[begin : begin + CHUNK]
        found.update(chunk)
        files.write(piece.descriptor, chunk, piece.position + begin)
    if piece.size == PIECE:
        # Nobody reads it soon; so the disk begins to write while the next piece is hashed, not when all are.
        os.posix_fadvise(piece.descriptor, piece.position, piece.size, os.POSIX_FADV_DONTNEED)
    return found.hexdigest()


def _read(piece: Piece) -> str:
    found = hashlib.sha256()
    scratch = memoryview(bytearray(min(CHUNK, piece.size) if piece.memory is None else 0))
    done = 0
    while done < piece.size:
        left = min(CHUNK, piece.size - done)
        into = scratch[:left] if piece.memory is None else piece.memory[done : done + left]
        got = os.preadv(piece.descriptor, [into], piece.position + done)
        if not got:
            raise EOFError
        found.update(into[:got])
        done += got
    return found.hexdigest()
