"""Reads and writes the files of a checkpoint while computing their hashes.

A block is hashed in pieces of fixed size, each with its own SHA-256, so that several threads can process a large tensor.
Hashing, reading and writing release the GIL, so training continues in the meantime.
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

_DAMAGE = {
    errno.ENOENT: "it is missing",
    errno.ELOOP: "it is a link",
    errno.EFBIG: "it is too large",
    # A bad sector, or a wrong checksum in the file system; on a network file system, the error may be temporary.
    errno.EIO: "the disk cannot read it; if it becomes readable again, rename it back",
}
SAFETENSORS_DTYPES = {  # names of dtypes in safetensors files
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
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<") for name in SAFETENSORS_DTYPES}
PIECE_BYTES = 4 << 20  # number of bytes with one hash; part of the format
CHUNK_BYTES = 1 << 18  # number of bytes hashed and written at a time, while they are in the processor's cache


def write(path: StoragePath, data: bytes | memoryview) -> None:
    """Creates a durable file."""
    with storage_of(path).create(path) as file:
        file.write(data, 0)


@contextlib.contextmanager
def open_file(path: StoragePath) -> Iterator[StoredFile]:
    """Yields a regular file for reading; rejects links, devices and pipes.

    Raises:
      CorruptCheckpointError: the file is missing or not a regular file, or cannot be read from the disk.
      CheckpointError: the system refuses to open or read the file, although its contents may be intact.
    """
    with _translate_errors(path), storage_of(path).open(path) as file:
        yield file


@contextlib.contextmanager
def _translate_errors(path: StoragePath) -> Iterator[None]:
    try:
        yield
    except NotRegularFile as error:
        raise CorruptCheckpointError(path, "it is not a regular file") from error
    except OSError as error:
        if error.errno in _DAMAGE:
            raise CorruptCheckpointError(path, _DAMAGE[error.errno]) from error
        raise CheckpointError(
            f"A checkpoint must be readable. Received: {path}: {error.strerror or error}. "
            "Repair it, or use another checkpoint."
        ) from error


def read(path: StoragePath) -> bytes:
    """Returns the contents of a file; see `open_file` for errors."""
    with _translate_errors(path):
        return storage_of(path).read(path)


def is_supported_dtype(dtype: np.dtype) -> bool:
    """Returns whether arrays of a dtype can be stored; the byte order must be little-endian."""
    return DTYPES.get(dtype.name) == dtype


class Piece(NamedTuple):
    """A range of a file with its own hash."""

    position: int  # position in the file, in bytes
    size: int  # number of bytes, at most `PIECE_BYTES`
    memory: memoryview | None  # source or destination of the bytes; None to discard them


def pieces(position: int, size: int, values: np.ndarray | None = None) -> list[Piece]:
    """Splits a block of a file into pieces; `values` is the C-contiguous block, or None to verify it only."""
    data = None if values is None else values.reshape(-1).view(np.uint8).data
    return [
        Piece(
            position + start,
            min(PIECE_BYTES, size - start),
            None if data is None else data[start : start + PIECE_BYTES],
        )
        for start in range(0, size, PIECE_BYTES)
    ]


def piece_count(size: int) -> int:
    """Returns the number of pieces of a block of `size` bytes."""
    return -(-size // PIECE_BYTES)


def write_hashed(file: NewFile, file_pieces: Sequence[Piece], threads: int) -> list[str]:
    """Writes pieces of a file until one fails; returns the SHA-256 of each piece in hexadecimal."""
    return _map(threads, functools.partial(_write, file), file_pieces)


def read_hashed(file: StoredFile, file_pieces: Sequence[Piece], threads: int) -> list[str]:
    """Reads pieces of a file; returns the SHA-256 of each in hexadecimal. Raises `EOFError` if the file is too short."""
    return _map(threads, functools.partial(_read, file), file_pieces)


def _map(threads: int, work: Callable[[Piece], str], file_pieces: Sequence[Piece]) -> list[str]:
    if len(file_pieces) < 2:  # starting threads takes longer than hashing a small tensor
        return [work(piece) for piece in file_pieces]
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        return list(pool.map(work, file_pieces))  # cancels the remaining pieces if one fails


def _write(file: NewFile, piece: Piece) -> str:
    assert piece.memory is not None
    digest = hashlib.sha256()
    for begin in range(0, piece.size, CHUNK_BYTES):
        chunk = piece.memory[begin : begin + CHUNK_BYTES]
        digest.update(chunk)
        file.write(chunk, piece.position + begin)
    if piece.size == PIECE_BYTES:
        # Starts the writeback while the next piece is hashed.
        file.on_range_written(piece.position, piece.size)
    return digest.hexdigest()


def _read(file: StoredFile, piece: Piece) -> str:
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(min(CHUNK_BYTES, piece.size) if piece.memory is None else 0))
    position = 0
    while position < piece.size:
        size = min(CHUNK_BYTES, piece.size - position)
        buffer = scratch[:size] if piece.memory is None else piece.memory[position : position + size]
        count = file.read_into(buffer, piece.position + position)
        if not count:
            raise EOFError
        digest.update(buffer[:count])
        position += count
    return digest.hexdigest()
