"""Reads and writes the files of a checkpoint while computing their hashes; their dtypes, and errors about them.

A block is hashed in pieces of fixed size, each with its own SHA-256, so that even a single large tensor is divided between
threads. The expensive operations (hashing, reading, writing) release the GIL, so that training continues meanwhile.
"""

import contextlib
import errno
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tfdist.errors import CheckpointError, CorruptCheckpointError
from tfdist.storage import NewFile, NotRegularFile, StoragePath, StoredFile, storage_of

_IS_DAMAGE = {
    errno.ENOENT: "it is missing",
    errno.ELOOP: "it is a link",
    errno.EFBIG: "it is too large",
    # A bad sector, or a wrong checksum in file systems that have them; over a network it may be temporary.
    errno.EIO: "the disk cannot read it; if it becomes readable again, rename it back",
}
_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
# Little-endian, as in safetensors. NumPy does not know the names of ml_dtypes until it is imported.
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<") for name in _CODES}
PIECE = 4 << 20  # bytes of a block with one hash; part of the format
CHUNK = 1 << 18  # bytes of a piece that are hashed while they are in the processor's cache


def write(path: StoragePath, data: bytes | memoryview) -> None:
    """Creates a file; it is durable.

    Raises:
      OSError: as raised by the storage.
    """
    with storage_of(path).create(path) as file:
        file.write(data, 0)


@contextlib.contextmanager
def opened(path: StoragePath) -> Iterator[StoredFile]:
    """Yields a regular file for reading; refuses links, devices and pipes.

    Raises:
      CorruptCheckpointError: the file is missing or not a regular one, or cannot be read from the disk.
      CheckpointError: the system refuses to open or read it, which does not mean that its contents are corrupted.
    """
    with _translated(path), storage_of(path).open(path) as file:
        yield file


@contextlib.contextmanager
def _translated(path: StoragePath) -> Iterator[None]:
    try:
        yield
    except NotRegularFile as error:
        raise CorruptCheckpointError(path, "it is not a file") from error
    except OSError as error:
        if error.errno in _IS_DAMAGE:
            raise CorruptCheckpointError(path, _IS_DAMAGE[error.errno]) from error
        raise CheckpointError(
            f"A checkpoint must be readable. Received: {path}: {error.strerror or error}. "
            "Repair it, or use another checkpoint."
        ) from error


def read(path: StoragePath) -> bytes:
    """Returns the contents of a file.

    Raises:
      CorruptCheckpointError, CheckpointError: see `opened`.
    """
    with _translated(path):
        return storage_of(path).read(path)


def is_known(dtype: np.dtype) -> bool:
    """Returns whether arrays of this dtype can be stored; those with the other byte order cannot."""
    return DTYPES.get(dtype.name) == dtype


def code(name: str) -> str:
    """Returns the name of a dtype of `DTYPES` in safetensors."""
    return _CODES[name]


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


def write_hashed(file: NewFile, each: Sequence[Piece], threads: int) -> list[str]:
    """Writes pieces of a file; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as raised by the storage; pieces that have not been started are not written.
    """
    return _map(threads, functools.partial(_write, file), each)


def read_hashed(file: StoredFile, each: Sequence[Piece], threads: int) -> list[str]:
    """Reads pieces of a file, into memory if they have any; returns the SHA-256 of each in hexadecimal.

    Raises:
      OSError: as raised by the storage.
      EOFError: the file is too short.
    """
    return _map(threads, functools.partial(_read, file), each)


def _map(threads: int, work: Callable[[Piece], str], each: Sequence[Piece]) -> list[str]:
    if len(each) < 2:  # most tensors are small, and starting threads takes longer than hashing them
        return [work(piece) for piece in each]
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        return list(pool.map(work, each))  # cancels the rest if one fails


def _write(file: NewFile, piece: Piece) -> str:
    assert piece.memory is not None
    digest = hashlib.sha256()
    for begin in range(0, piece.size, CHUNK):
        chunk = piece.memory[begin : begin + CHUNK]
        digest.update(chunk)
        file.write(chunk, piece.position + begin)
    if piece.size == PIECE:
        # So that its writeback starts while the next piece is hashed, not only after the last.
        file.is_complete(piece.position, piece.size)
    return digest.hexdigest()


def _read(file: StoredFile, piece: Piece) -> str:
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(min(CHUNK, piece.size) if piece.memory is None else 0))
    done = 0
    while done < piece.size:
        size = min(CHUNK, piece.size - done)
        buffer = scratch[:size] if piece.memory is None else piece.memory[done : done + size]
        count = file.read_into(buffer, piece.position + done)
        if not count:
            raise EOFError
        digest.update(buffer[:count])
        done += count
    return digest.hexdigest()
