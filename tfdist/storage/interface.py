"""`Storage`, the interface of storage backends, and the paths of files in them."""

import abc
import contextlib
import dataclasses
import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeAlias


@dataclasses.dataclass(frozen=True, order=True)
class Url:
    """A path in a storage other than this machine's file system, such as `gs://bucket/runs/first`.

    A `Url` is not an `os.PathLike`, so it cannot be opened as a local file by mistake.

    Attributes:
      scheme: the part before `://`.
      key: the part after `://`: components separated by single slashes, without a slash at either end.
    """

    scheme: str
    key: str

    def __post_init__(self) -> None:
        """Normalizes the slashes."""
        object.__setattr__(self, "key", "/".join(filter(None, self.key.split("/"))))

    @property
    def name(self) -> str:
        """The last component."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        """The path without the last component. The root is its own parent."""
        return Url(self.scheme, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "Url":
        """Returns the path with its last component replaced."""
        return self.parent / name

    def __truediv__(self, name: str) -> "Url":
        return Url(self.scheme, f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"


# The path of a file in a storage. Access it with `storage_of(path)`: `Path`'s own methods that access files are local only.
StoragePath: TypeAlias = Path | Url
AnyPath: TypeAlias = str | os.PathLike[str] | StoragePath  # a path that a user passes

_COPY_BYTES = 1 << 22  # number of bytes copied at a time
_MAX_READ_BYTES = 1 << 30  # limit of `read`: an untrusted file may claim any size


class Info(NamedTuple):
    """Information about the file or directory at a path."""

    is_directory: bool  # whether it is a directory
    size: int  # size of a file in bytes
    modified_time: float  # time of the last modification, in seconds since 1970 (UTC)


class Entry(NamedTuple):
    """A file or directory listed in its parent directory."""

    name: str  # name in the parent directory
    is_directory: bool  # whether the entry is a directory; False for a link to one


class NotRegularFile(OSError):
    """Raised for a directory, device or pipe where a regular file is needed."""


class StoredFile(abc.ABC):
    """A file that is being read; several threads may read it concurrently."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Size in bytes."""

    @abc.abstractmethod
    def read_into(self, memory: memoryview, position: int) -> int:
        """Reads bytes from a position; returns their number, which may be less than requested, or 0 at the end."""

    def read(self, size: int, position: int = 0) -> bytes:
        """Returns bytes from a position; fewer than `size` only at the end."""
        data, total = bytearray(size), 0
        while total < size and (count := self.read_into(memoryview(data)[total:], position + total)):
            total += count
        return bytes(data[:total])


class NewFile(abc.ABC):
    """A file that is being written; several threads may write different ranges of it concurrently."""

    @abc.abstractmethod
    def write(self, data: bytes | memoryview, position: int) -> None:
        """Writes all bytes at a position. Large arrays are passed without a copy."""

    def on_range_written(self, position: int, size: int) -> None:
        """Called after a range has been written, so that the storage can begin to make it durable."""


class AppendedFile(abc.ABC):
    """A file to which a run appends."""

    @abc.abstractmethod
    def write(self, data: bytes) -> None:
        """Appends all bytes without buffering, so they survive the end of the process."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Returns when all bytes are durable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file without writing to it."""


class Storage(abc.ABC):
    """A store of durable files: a tree of directories and files that all processes of a run see.

    A storage has no state that differs between processes, and its methods may be called from any thread. They raise the
    same subclasses of `OSError` as `os` (`FileNotFoundError`, `FileExistsError`, ...), with a `strerror` for the user. A
    file is durable if it survives a failure of the machine.
    """

    # Files

    @abc.abstractmethod
    def open(self, path: StoragePath) -> AbstractContextManager[StoredFile]:
        """Opens a file for reading.

        Raises:
          NotRegularFile: the path is not a regular file.
          OSError: with `errno.ELOOP`, if the path is a link.
        """

    @abc.abstractmethod
    def create(self, path: StoragePath) -> AbstractContextManager[NewFile]:
        """Creates a file that must not exist yet; it is durable once the context exits without an error.

        An `OSError` raised within the context contains the path.
        """

    @abc.abstractmethod
    def append(self, path: StoragePath, *, is_new: bool = False) -> AppendedFile:
        """Opens a file for appending, and creates it if necessary; with `is_new`, it must not exist yet.

        Raises:
          NotRegularFile: the path is a link or not a regular file, or the file has several hard links.
        """

    @abc.abstractmethod
    def replace(self, path: StoragePath, data: bytes) -> None:
        """Writes a file, replacing an existing one; it is durable when this returns.

        After a failure, the file has either the old or the new contents. A link is replaced, not followed.
        """

    @abc.abstractmethod
    def remove(self, path: StoragePath) -> None:
        """Removes a file."""

    @abc.abstractmethod
    def lock(self, path: StoragePath, owner: bytes = b"", *, exclusive: bool = True) -> AbstractContextManager[object]:
        """Locks a file, created if necessary, until the context exits or the process ends.

        Args:
          path: path of the file.
          owner: contents of the file during the context, for information only; omitted if they cannot be written.
          exclusive: False opens the file without locking it, where locks are not supported.

        Raises:
          BlockingIOError: another process, on any host, has locked the file.
          NotRegularFile: the path is a link or not a regular file, or the file has several hard links.
          OSError: the storage does not support locks for this path.
        """

    # Directories

    @abc.abstractmethod
    def info(self, path: StoragePath) -> Info | None:
        """Returns information about the file or directory at a path; None if nothing is there."""

    @abc.abstractmethod
    def entries(self, directory: StoragePath) -> list[Entry]:
        """Returns the entries of a directory, in any order."""

    @abc.abstractmethod
    def make_directory(self, directory: StoragePath, *, is_new: bool = False) -> None:
        """Creates a directory and its parents if necessary; with `is_new`, its parent must exist, but it must not."""

    @abc.abstractmethod
    def remove_directory(self, directory: StoragePath) -> None:
        """Removes a directory with all of its contents. After a failure, any part of them may remain."""

    @abc.abstractmethod
    def rename(self, path: StoragePath, target: StoragePath) -> None:
        """Renames a file, replacing an existing one, or a directory, whose new path must not exist.

        The change is atomic: every process sees the contents under exactly one of the two names.
        """

    @abc.abstractmethod
    def sync_directory(self, directory: StoragePath) -> None:
        """Returns when all creations, renames and removals in a directory are durable."""

    # Methods with a default implementation.

    def read(self, path: StoragePath) -> bytes:
        """Returns the contents of a file; raises `OSError` if it is larger than 1 GiB."""
        with self.open(path) as file:
            if file.size > _MAX_READ_BYTES:
                problem = f"it has {file.size} bytes, more than the largest allowed {_MAX_READ_BYTES}"
                raise OSError(errno.EFBIG, problem, str(path))
            return file.read(file.size)

    def copy_to(self, path: StoragePath, local_path: Path) -> None:
        """Copies a file of any size to a new local file."""
        with self.open(path) as file, local_path.open("xb") as copy:
            for position in range(0, file.size, _COPY_BYTES):
                copy.write(file.read(_COPY_BYTES, position))

    def check_writable(self, directory: StoragePath) -> None:
        """Raises `OSError` if a directory, which need not exist yet, is known not to be writable."""

    def real_path(self, path: StoragePath) -> StoragePath:
        """Returns the canonical path of a file, with links resolved."""
        return path

    def exists(self, path: StoragePath) -> bool:
        """Returns whether there is a file or directory at a path."""
        return self.info(path) is not None

    def is_directory(self, path: StoragePath) -> bool:
        """Returns whether there is a directory at a path."""
        info = self.info(path)
        return info is not None and info.is_directory

    @contextlib.contextmanager
    def staged(self, path: StoragePath) -> Iterator[Path]:
        """Yields a local path with the same file name, for libraries that write files or directories themselves.

        When the context exits without an error, what was written is durable at `path`, replacing an existing file.
        """
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            local_path = Path(folder) / path.name
            yield local_path
            partial = path.with_name(f"{staged_prefix(path)}{secrets.token_hex(4)}")
            try:
                self._upload(local_path, partial)
                self.rename(partial, path)
                self.sync_directory(path.parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._remove_any(partial, self.is_directory(partial))
                raise

    def clean_staged(self, path: StoragePath) -> None:
        """Removes what `staged(path)` left behind in killed processes; must not be called while `staged` is in use."""
        for entry in self.entries(path.parent):
            if entry.name.startswith(staged_prefix(path)):
                self._remove_any(path.with_name(entry.name), entry.is_directory)

    def _remove_any(self, path: StoragePath, is_directory: bool) -> None:
        (self.remove_directory if is_directory else self.remove)(path)

    def _upload(self, local_path: Path, path: StoragePath) -> None:
        if local_path.is_dir():
            self.make_directory(path, is_new=True)
            for child in local_path.iterdir():
                self._upload(child, path / child.name)
            self.sync_directory(path)
            return
        with local_path.open("rb") as source, self.create(path) as file:
            for position in range(0, local_path.stat().st_size, _COPY_BYTES):
                file.write(source.read(_COPY_BYTES), position)


def staged_prefix(path: StoragePath) -> str:
    """Returns the prefix of the names of incomplete files that `Storage.staged` writes next to a path."""
    return f".{path.name}."
