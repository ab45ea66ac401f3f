"""The files of a checkpoint, opened to be written or to be read."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tfdist.errors import CheckpointError, Damaged

_IS_DAMAGE = {
    errno.ENOENT: "it is missing",
    errno.ELOOP: "it is a link",
    # A bad sector, or a wrong checksum of a file system that has them; over a network it may pass.
    errno.EIO: "the disk cannot read it; if it can again, rename it back",
}


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """Yields the descriptor of a new file, open for writing; what is written is on the disk when it closes.

    Raises:
      OSError: as the system says, with the path, which the errors of `write` and `fsync` lack.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def write(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Writes all of the bytes, where `os.pwrite` may stop early."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, position)
        left, position = left[written:], position + written


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yields the descriptor of a file, open for reading: of a regular one, neither a link nor a device nor a pipe.

    Raises:
      Damaged: the file is missing or no regular one, or the disk has lost it.
      CheckpointError: the system refuses to open it, or to read it, which says nothing about what is in it.
    """
    try:
        # O_NONBLOCK: to open a pipe would wait for somebody who writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Damaged(path, "it is no file")
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _IS_DAMAGE:
            raise Damaged(path, _IS_DAMAGE[error.errno]) from error
        raise CheckpointError(
            f"A checkpoint must be readable. Received: {path}: {error.strerror or error}. "
            "Mend that, or continue from another one."
        ) from error


def read(path: Path) -> bytes:
    """Returns what is in a file.

    Raises:
      Damaged, CheckpointError: see `opened`.
    """
    with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        return file.read()
