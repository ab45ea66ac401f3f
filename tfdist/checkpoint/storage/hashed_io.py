"""Writes and reads bytes while computing their hashes, in several threads.

A block is hashed in pieces of fixed size, each with its own SHA-256, so that even a single large tensor is divided
between threads. The expensive operations (hashing, reading, writing) release the GIL, so that training continues
meanwhile.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tfdist.checkpoint.storage import files

PIECE = 4 << 20  # bytes of a block with one hash; part of the format
CHUNK = 1 << 18  # bytes of a piece that are hashed while they are in the processor's cache


class Piece(NamedTuple):
    """A range of a file with one hash.

    Attributes:
      descriptor: file descriptor.
      position: position in the file.
      size: number of bytes, at most `PIECE`.
      memory: source or destination of the bytes; None to discard them.
    """

    descriptor: int
    position: int
    size: int
    memory: memoryview | None


def pieces(descriptor: int, position: int, size: int, values: np.ndarray | None = None) -> list[Piece]:
    """Splits a block into pieces.

    Args:
      descriptor: file descriptor.
      position: position of the block in the file.
      size: size of the block in bytes.
      values: the block, C-contiguous; None if it is not in memory.
    """
    memory = None if values is None else values.reshape(-1).view(np.uint8).data
    return [
        Piece(descriptor, position + at, min(PIECE, size - at), None if memory is None else memory[at : at + PIECE])
        for at in range(0, size, PIECE)
    ]


def count(size: int) -> int:
    """Returns the number of pieces of a block of `size` bytes."""
    return -(-size // PIECE)


def write(each: Sequence[Piece], threads: int) -> list[str]:
    """Writes pieces; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as raised by the system; pieces that have not been started are not written.
    """
    return _over(threads, _write, each)


def read(each: Sequence[Piece], threads: int) -> list[str]:
    """Reads pieces, into memory if they have any; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as raised by the system.
      EOFError: the file is too short.
    """
    return _over(threads, _read, each)


def _over(threads: int, work: Callable[[Piece], str], each: Sequence[Piece]) -> list[str]:
    if len(each) < 2:  # most tensors are small, and starting threads takes longer than hashing them
        return [work(piece) for piece in each]
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        return list(pool.map(work, each))  # cancels the rest if one fails


def _write(piece: Piece) -> str:
    assert piece.memory is not None
    found = hashlib.sha256()
    for begin in range(0, piece.size, CHUNK):
        chunk = piece.memory[begin : begin + CHUNK]
        found.update(chunk)
        files.write(piece.descriptor, chunk, piece.position + begin)
    if piece.size == PIECE:
        # The data is not needed soon, so this starts its writeback while the next piece is hashed, not only after the
        # last.
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
