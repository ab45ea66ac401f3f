"""Files of this machine, including shared file systems such as NFS."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tfdist.storage.interface import (
    AppendedFile,
    Entry,
    Info,
    LockFile,
    NewFile,
    NotRegularFile,
    Storage,
    StoragePath,
    StoredFile,
    staged_prefix,
)

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FileSystem(Storage):
    """The file system of this machine. Every path is a `pathlib.Path`."""

    @contextlib.contextmanager
    def open(self, path: StoragePath) -> Iterator[StoredFile]:
        """See base class."""
        descriptor = _regular_file(path, os.O_RDONLY)
        try:
            yield _Stored(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def create(self, path: StoragePath) -> Iterator[NewFile]:
        """See base class."""
        try:
            descriptor = os.open(_local(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                yield _New(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:  # errors of `write` and `fsync` have no path
            raise OSError(error.errno, error.strerror, str(path)) from error

    def append(self, path: StoragePath, *, is_new: bool = False) -> AppendedFile:
        """See base class."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = _regular_file(path, flags | os.O_EXCL if is_new else flags, is_written=True)
        return _Appended(open(descriptor, "ab", buffering=0))

    def replace(self, path: StoragePath, data: bytes) -> None:
        """See base class."""
        partial = _local(path.with_name(f"{path.name}.partial"))
        partial.unlink(missing_ok=True)  # left by a killed process, or a link to a file that would be overwritten
        with self.create(partial) as file:
            file.write(data, 0)
        os.replace(partial, _local(path))
        self.sync_directory(path.parent)

    def remove(self, path: StoragePath) -> None:
        """See base class."""
        _local(path).unlink()

    @contextlib.contextmanager
    def lock(self, path: StoragePath, *, exclusive: bool = True) -> Iterator[LockFile]:
        """See base class. The system releases the lock when the process ends for any reason."""
        descriptor = _regular_file(path, os.O_RDWR | os.O_CREAT, is_written=True)
        with open(descriptor, "r+b", buffering=0) as file:
            if exclusive:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield _Lock(file)

    def info(self, path: StoragePath) -> Info | None:
        """See base class."""
        try:
            status = os.stat(_local(path))
        except OSError as error:
            if error.errno in _MISSING:
                return None
            raise
        return Info(stat.S_ISDIR(status.st_mode), status.st_size, status.st_mtime)

    def entries(self, directory: StoragePath) -> list[Entry]:
        """See base class."""
        with os.scandir(_local(directory)) as entries:
            return [Entry(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def make_directory(self, directory: StoragePath, *, is_new: bool = False) -> None:
        """See base class."""
        _local(directory).mkdir(parents=not is_new, exist_ok=not is_new)

    def remove_directory(self, directory: StoragePath) -> None:
        """See base class. On NFS it fails while a process reads a file that was in it."""
        shutil.rmtree(_local(directory))

    def rename(self, path: StoragePath, target: StoragePath) -> None:
        """See base class."""
        _local(path).rename(_local(target))

    def sync_directory(self, directory: StoragePath) -> None:
        """See base class."""
        _sync_one(_local(directory), os.O_DIRECTORY)

    def check_writable(self, directory: StoragePath) -> None:
        """See base class."""
        path = _local(directory).absolute()
        nearest = next(parent for parent in (path, *path.parents) if self.exists(parent))
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a directory", str(directory))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write in {nearest}", str(directory))

    def resolved(self, path: StoragePath) -> Path:
        """See base class."""
        return Path(os.path.realpath(_local(path)))  # `Path.resolve` fails for a cycle of links

    def is_link(self, path: StoragePath) -> bool:
        """See base class."""
        return _local(path).is_symlink()

    @contextlib.contextmanager
    def staged(self, path: StoragePath) -> Iterator[Path]:
        """See base class. It is written to a directory next to the path, so that one rename is enough."""
        target = _local(path).absolute()
        with tempfile.TemporaryDirectory(prefix=staged_prefix(target), dir=target.parent) as staged:
            written = Path(staged) / target.name
            yield written
            _sync(written)
            written.rename(target)
            self.sync_directory(target.parent)


class _Stored(StoredFile):
    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, memory: memoryview, position: int) -> int:
        return os.preadv(self._descriptor, [memory], position)


class _New(NewFile):
    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview, position: int) -> None:
        _write(self._descriptor, data, position)

    def is_complete(self, position: int, size: int) -> None:
        # The range is not needed soon, so this starts its writeback already, not only at the end of the file.
        os.posix_fadvise(self._descriptor, position, size, os.POSIX_FADV_DONTNEED)


class _Appended(AppendedFile):
    """An unbuffered file: `close` does not repeat a write that has failed on a full disk, which would hide the error."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _Lock(LockFile):
    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.truncate(0)
        _write(self._file.fileno(), data, 0)
        # The file stays open, and NFS shows changes to others only after close or fsync.
        os.fsync(self._file.fileno())

    def clear(self) -> None:
        self._file.truncate(0)


def _local(path: StoragePath) -> Path:
    return path if isinstance(path, Path) else Path(str(path))


def _regular_file(path: StoragePath, flags: int, *, is_written: bool = False) -> int:
    """Opens a regular file; a file to be written must not have several names, as a hard link of a copied directory has.

    Raises:
      NotRegularFile: the path is not that of such a file.
      OSError: with ELOOP for a symbolic link.
    """
    try:
        # O_NONBLOCK: otherwise opening a pipe would wait for its other end.
        descriptor = os.open(_local(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link, which is not followed", str(path)) from error
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise NotRegularFile(errno.EINVAL, "not a regular file", str(path)) from error
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and not (is_written and status.st_nlink > 1):
        return descriptor
    os.close(descriptor)
    problem = "a file with several names" if stat.S_ISREG(status.st_mode) else "not a regular file"
    raise NotRegularFile(errno.EINVAL, problem, str(path))


def _sync(path: Path) -> None:
    """Returns when a file, or a directory with all of its contents, is durable."""
    for inner in path.iterdir() if path.is_dir() else ():
        _sync(inner)
    _sync_one(path)


def _sync_one(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Writes all bytes, as `os.pwrite` may write fewer."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, position)
        left, position = left[written:], position + written
