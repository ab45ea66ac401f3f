"""Opens the files of a checkpoint for writing or reading."""

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
    # A bad sector, or a wrong checksum in file systems that have them; over a network it may be temporary.
    errno.EIO: "the disk cannot read it; if it can again, rename it back",
}


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """Yields the file descriptor of a new file for writing, which is flushed to disk on exit.

    Raises:
      OSError: as raised by the system, but with the path, which errors of `write` and `fsync` lack.
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
    """Writes all bytes, as `os.pwrite` may write fewer."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, position)
        left, position = left[written:], position + written


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yields the file descriptor of a regular file for reading; refuses links, devices and pipes.

    Raises:
      Damaged: the file is missing or not a regular one, or cannot be read from the disk.
      CheckpointError: the system refuses to open or read it, which does not mean that its contents are corrupted.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
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
    """Returns the contents of a file.

    Raises:
      Damaged, CheckpointError: see `opened`.
    """
    with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        return file.read()
