"""Finds where each record of a TFRecord file begins, so that records can be read in any order.

A record is its length (8 bytes), a checksum of the length (4), the data, and a checksum of the data (4). Only the lengths
are read, which takes some microseconds per record.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfdist.errors import InputError

_HEADER, _FOOTER = 12, 4
_CRC32C = 0x82F63B78  # reversed polynomial of Castagnoli's CRC
_MASK = 0xA282EAD8
_COMPRESSED = (b"\x1f\x8b", b"x\x9c", b"x\x01", b"x\xda")


class RecordIndex(NamedTuple):
    """Where records are.

    Attributes:
      files: the files.
      file: index of each record's file, int32 [records].
      number: index of each record in its file, int64 [records].
      offset: place of its data in the file, in bytes, int64 [records].
      length: number of its bytes, int64 [records].
    """

    files: tuple[str, ...]
    file: np.ndarray
    number: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    def part(self, records: np.ndarray) -> "RecordIndex":
        """Returns the index of some of the records."""
        return RecordIndex(self.files, *(values[records] for values in self[1:]))

    def read(self, records: np.ndarray) -> np.ndarray:
        """Reads records; returns their bytes, an array of objects."""
        found = np.empty(len(records), object)
        for place, record in enumerate(records):
            with open(self.files[self.file[record]], "rb", buffering=0) as file:
                found[place] = os.pread(file.fileno(), int(self.length[record]), int(self.offset[record]))
        return found

    def described(self, record: int) -> str:
        """Names a record, for errors."""
        return f"record {self.number[record]} of {self.files[self.file[record]]}"


def record_index(files: Sequence[str]) -> RecordIndex:
    """Returns the index of all records of some files, in order.

    Raises:
      InputError: a file is not a complete, uncompressed TFRecord file; or there are no records.
    """
    places = [_places(file) for file in files]
    counts = [len(offsets) for offsets, _ in places]
    if not sum(counts):
        raise InputError(f"TFRecord files must have records. Received: {len(files)} empty files, such as {files[0]}.")
    return RecordIndex(
        tuple(files),
        np.repeat(np.arange(len(files), dtype=np.int32), counts),
        np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        np.concatenate([offsets for offsets, _ in places]),
        np.concatenate([lengths for _, lengths in places]),
    )


def _places(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns offset and length of each record's data in a file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return np.zeros(0, np.int64), np.zeros(0, np.int64)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _check_first(path, content[:_HEADER])
                begins, lengths, headers = _walk(content, size)
    except OSError as error:
        raise InputError(f"TFRecord files must be readable. Received: {path}: {error.strerror}.") from error
    is_valid = _masked_crc(headers[:, :8]) == headers[:, 8:].copy().view("<u4")[:, 0]
    if not is_valid.all():
        raise _damaged(path, f"the header of record {int(np.argmin(is_valid))} has a wrong checksum")
    if begins[-1] + _HEADER + lengths[-1] + _FOOTER != size:
        raise _damaged(path, f"its last record, {len(begins) - 1}, is incomplete")
    return begins + _HEADER, lengths


def _walk(content: mmap.mmap, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns place, length and header of each record; the last may be incomplete or damaged."""
    begins, lengths, headers, at = [], [], [], 0
    unpack = struct.Struct("<Q").unpack_from
    while at < size:
        header = content[at : at + _HEADER].ljust(_HEADER, b"\0")
        (length,) = unpack(header)
        begins.append(at)
        lengths.append(min(length, 2**62))
        headers.append(header)
        at += _HEADER + length + _FOOTER
    table = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, _HEADER)
    return np.array(begins, np.int64), np.array(lengths, np.int64), table


def _check_first(path: str, header: bytes) -> None:
    """Raises `InputError` if a file does not begin with a record."""
    table = np.frombuffer(header.ljust(_HEADER, b"\0"), np.uint8)[None]
    if _masked_crc(table[:, :8])[0] == table[:, 8:].copy().view("<u4")[0, 0]:
        return
    if header.startswith(_COMPRESSED):
        raise InputError(
            f"TFRecord files must not be compressed, so that records can be read in any order. Received: {path}. Write it "
            "without compression."
        )
    raise InputError(f"Files must be TFRecord files. Received: {path}, which does not begin with a record.")


def _damaged(path: str, cause: str) -> InputError:
    return InputError(f"TFRecord files must be complete. Received: {path}: {cause}. Write or copy it again.")


def _masked_crc(content: np.ndarray) -> np.ndarray:
    """Returns the masked CRC-32C of each row of bytes, uint8 [n, bytes], as TFRecord files have it."""
    crc = np.full(len(content), 0xFFFFFFFF, np.uint32)
    for column in content.T:
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK)


def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_CRC32C), table >> np.uint32(1))
    return table.astype(np.uint32)


_TABLE = _table()
