"""The storage backend for the file system of this machine, including shared file systems such as NFS."""

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
    NewFile,
    NotRegularFile,
    Storage,
    StoragePath,
    StoredFile,
    staged_prefix,
)

_MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FileSystem(Storage):
    """The file system of this machine."""

    @contextlib.contextmanager
    def open(self, path: StoragePath) -> Iterator[StoredFile]:
        with open(_open_regular_file(path, os.O_RDONLY), "rb", buffering=0) as file:
            yield _OpenFile(file.fileno())

    @contextlib.contextmanager
    def create(self, path: StoragePath) -> Iterator[NewFile]:
        try:
            with open(_local_path(path), "xb", buffering=0) as file:
                yield _OpenFile(file.fileno())
                os.fsync(file.fileno())
        except OSError as error:  # errors of `write` and `fsync` have no path
            raise OSError(error.errno, error.strerror, str(path)) from error

    def append(self, path: StoragePath, *, is_new: bool = False) -> AppendedFile:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = _open_regular_file(path, flags | os.O_EXCL if is_new else flags, for_writing=True)
        return _AppendedFile(open(descriptor, "ab", buffering=0))

    def replace(self, path: StoragePath, data: bytes) -> None:
        partial = _local_path(path.with_name(f"{path.name}.partial"))
        partial.unlink(missing_ok=True)  # left by a killed process, or a link to another file
        with self.create(partial) as file:
            file.write(data, 0)
        os.replace(partial, _local_path(path))
        self.sync_directory(path.parent)

    def remove(self, path: StoragePath) -> None:
        _local_path(path).unlink()

    @contextlib.contextmanager
    def lock(self, path: StoragePath, owner: bytes = b"", *, exclusive: bool = True) -> Iterator[None]:
        """See base class. The system releases the lock when the process ends for any reason."""
        descriptor = _open_regular_file(path, os.O_RDWR | os.O_CREAT, for_writing=True)
        with open(descriptor, "r+b", buffering=0) as file:
            if exclusive:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not owner:
                yield
                return
            with contextlib.suppress(OSError):  # the disk may be full, and the run may free up space
                file.truncate(0)
                _write(descriptor, owner, 0)
                # The file stays open, and NFS shows changes to other hosts only after close or fsync.
                os.fsync(descriptor)
            try:
                yield
            finally:
                file.truncate(0)

    def info(self, path: StoragePath) -> Info | None:
        try:
            status = os.stat(_local_path(path))
        except OSError as error:
            if error.errno in _MISSING_ERRNOS:
                return None
            raise
        return Info(stat.S_ISDIR(status.st_mode), status.st_size, status.st_mtime)

    def entries(self, directory: StoragePath) -> list[Entry]:
        with os.scandir(_local_path(directory)) as entries:
            return [Entry(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def make_directory(self, directory: StoragePath, *, is_new: bool = False) -> None:
        _local_path(directory).mkdir(parents=not is_new, exist_ok=not is_new)

    def remove_directory(self, directory: StoragePath) -> None:
        """See base class. On NFS, this fails while a process reads a file that was in it."""
        shutil.rmtree(_local_path(directory))

    def rename(self, path: StoragePath, target: StoragePath) -> None:
        _local_path(path).rename(_local_path(target))

    def sync_directory(self, directory: StoragePath) -> None:
        _fsync(_local_path(directory), os.O_DIRECTORY)

    def check_writable(self, directory: StoragePath) -> None:
        path = _local_path(directory).absolute()
        nearest_parent = next(parent for parent in (path, *path.parents) if self.exists(parent))
        if not nearest_parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest_parent} is not a directory", str(directory))
        if not os.access(nearest_parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write in {nearest_parent}", str(directory))

    def real_path(self, path: StoragePath) -> Path:
        return Path(os.path.realpath(_local_path(path)))  # `Path.resolve` fails for a cycle of links

    @contextlib.contextmanager
    def staged(self, path: StoragePath) -> Iterator[Path]:
        """See base class. Stages next to the path, so that a single rename suffices."""
        target = _local_path(path).absolute()
        with tempfile.TemporaryDirectory(prefix=staged_prefix(target), dir=target.parent) as staging:
            local_path = Path(staging) / target.name
            yield local_path
            _sync(local_path)
            local_path.rename(target)
            self.sync_directory(target.parent)


class _OpenFile(StoredFile, NewFile):
    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, memory: memoryview, position: int) -> int:
        return os.preadv(self._descriptor, [memory], position)

    def write(self, data: bytes | memoryview, position: int) -> None:
        _write(self._descriptor, data, position)

    def on_range_written(self, position: int, size: int) -> None:
        # Starts the writeback of the range now rather than at the end of the file.
        os.posix_fadvise(self._descriptor, position, size, os.POSIX_FADV_DONTNEED)


class _AppendedFile(AppendedFile):
    """An unbuffered file: `close` does not retry a write that failed on a full disk, which would hide the error."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, data: bytes) -> None:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _local_path(path: StoragePath) -> Path:
    return path if isinstance(path, Path) else Path(str(path))


def _open_regular_file(path: StoragePath, flags: int, *, for_writing: bool = False) -> int:
    """Opens a regular file. One to be written must have a single hard link: a copied directory may share its files.

    Raises:
      NotRegularFile: the path is not a regular file, or the file to be written has several hard links.
      OSError: with ELOOP for a symbolic link.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        descriptor = os.open(_local_path(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link, which is not followed", str(path)) from error
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise NotRegularFile(errno.EINVAL, "not a regular file", str(path)) from error
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and not (for_writing and status.st_nlink > 1):
        return descriptor
    os.close(descriptor)
    problem = "a file with several hard links" if stat.S_ISREG(status.st_mode) else "not a regular file"
    raise NotRegularFile(errno.EINVAL, problem, str(path))


def _sync(path: Path) -> None:
    """Flushes a file, or a directory with all of its contents, to disk."""
    for child in path.iterdir() if path.is_dir() else ():
        _sync(child)
    _fsync(path)


def _fsync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Writes all bytes; a single `os.pwrite` may write fewer."""
    remaining = memoryview(data)
    while remaining:
        count = os.pwrite(descriptor, remaining, position)
        remaining, position = remaining[count:], position + count
