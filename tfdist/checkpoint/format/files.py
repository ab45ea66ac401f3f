"""Reads and writes the files of a checkpoint; the storage's errors of reading become errors about the checkpoint."""

import contextlib
import errno
from collections.abc import Iterator

from tfdist.errors import CheckpointError, CorruptCheckpointError
from tfdist.storage import NotRegularFile, StoragePath, StoredFile, storage_of

_IS_DAMAGE = {
    errno.ENOENT: "it is missing",
    errno.ELOOP: "it is a link",
    errno.EFBIG: "it is too large",
    # A bad sector, or a wrong checksum in file systems that have them; over a network it may be temporary.
    errno.EIO: "the disk cannot read it; if it becomes readable again, rename it back",
}


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
