"""The interface of storages, and paths of files in them."""

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
from typing import NamedTuple, Protocol, Self, TypeAlias


class StoragePath(Protocol):
    """The path of a file in a storage; `storage_of(path)` accesses the file.

    A `pathlib.Path` is a `StoragePath`, but its methods that access files only work on this machine.
    """

    @property
    def name(self) -> str:
        """The last component."""

    @property
    def parent(self) -> Self:
        """The path without the last component."""

    def with_name(self, name: str, /) -> Self:
        """Returns the path with another last component."""

    def __truediv__(self, name: str, /) -> Self: ...

    def __lt__(self, other: Self, /) -> bool: ...

    def __hash__(self) -> int: ...


AnyPath: TypeAlias = str | os.PathLike[str] | StoragePath  # accepted from users


@dataclasses.dataclass(frozen=True, order=True)
class Url:
    """A path of a storage that is not this machine's file system, such as `gs://bucket/runs/first`.

    It is not an `os.PathLike`, so that it cannot be opened as a local file by mistake.

    Attributes:
      scheme: the part before `://`.
      key: the part after it: components separated by single slashes, without a slash at either end.
    """

    scheme: str
    key: str

    def __post_init__(self) -> None:
        """Normalizes the slashes."""
        object.__setattr__(self, "key", "/".join(filter(None, self.key.split("/"))))

    @property
    def name(self) -> str:
        """See `StoragePath`."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        """See `StoragePath`. The root is its own parent."""
        return Url(self.scheme, self.key.rpartition("/")[0])

    def with_name(self, name: str, /) -> "Url":
        """See `StoragePath`."""
        return self.parent / name

    def __truediv__(self, name: str, /) -> "Url":
        return Url(self.scheme, f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"


_COPY_BYTES = 1 << 22  # that are copied at once
_MAX_READ_BYTES = 1 << 30  # of a file that `read` returns; files from others may claim any size


class Info(NamedTuple):
    """The file or directory at a path.

    Attributes:
      is_directory: whether it is a directory.
      size: size in bytes of a file.
      modified: time of the last change, in seconds since 1970 (UTC).
    """

    is_directory: bool
    size: int
    modified: float


class Entry(NamedTuple):
    """A file or directory in a directory.

    Attributes:
      name: its name there.
      is_directory: whether it is a directory itself; False for a link to one.
    """

    name: str
    is_directory: bool


class NotRegularFile(OSError):
    """A directory, device or pipe, where a file is required."""


class StoredFile(abc.ABC):
    """A file that is being read; several threads may read it concurrently."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Size in bytes."""

    @abc.abstractmethod
    def read_into(self, memory: memoryview, position: int) -> int:
        """Reads bytes from a position; returns their number, which may be less than requested, and 0 at the end."""

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
        """Writes all bytes at a position. Large arrays are passed as they are, to be written without a copy."""

    def is_complete(self, position: int, size: int) -> None:
        """Called when a range has been written; the storage may begin to make it durable."""


class AppendedFile(abc.ABC):
    """A file that grows for as long as a run lasts."""

    @abc.abstractmethod
    def write(self, data: bytes) -> None:
        """Appends all bytes, without buffering: they survive the end of the process."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Returns when all bytes are durable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file; writes nothing."""


class LockFile(abc.ABC):
    """A file that is locked. Its contents are for people: the lock does not depend on them."""

    @abc.abstractmethod
    def write(self, data: bytes) -> None:
        """Replaces the contents, durably, so that other hosts can read them."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Makes the file empty."""


class Storage(abc.ABC):
    """A store of durable files: a tree of directories and files, with the same view from all processes of a run.

    A storage has no state that differs between processes; its methods may be called by any thread. They raise the
    subclasses of `OSError` that `os` raises (`FileNotFoundError`, `FileExistsError`, ...), with a `strerror` for the
    user. A file is durable if it survives the failure of the machine.
    """

    # Files

    @abc.abstractmethod
    def open(self, path: StoragePath) -> AbstractContextManager[StoredFile]:
        """Opens a file for reading.

        Raises:
          NotRegularFile: it is not a regular file. A link to a file is refused, too, with `errno.ELOOP`.
        """

    @abc.abstractmethod
    def create(self, path: StoragePath) -> AbstractContextManager[NewFile]:
        """Creates a file that must not exist; it is durable when the context exits without an error.

        The errors of the body are raised with the path.
        """

    @abc.abstractmethod
    def append(self, path: StoragePath, *, is_new: bool = False) -> AppendedFile:
        """Opens a file to append to, and creates it if necessary; with `is_new` it must not exist.

        Raises:
          NotRegularFile: it is not a regular file, or has several names; a link is refused, too.
        """

    @abc.abstractmethod
    def replace(self, path: StoragePath, data: bytes) -> None:
        """Writes a file, replacing an existing one; it is durable when this returns.

        After a failure it has either the old or the new contents. A link is replaced, not followed.
        """

    @abc.abstractmethod
    def remove(self, path: StoragePath) -> None:
        """Removes a file."""

    @abc.abstractmethod
    def lock(self, path: StoragePath, *, exclusive: bool = True) -> AbstractContextManager[LockFile]:
        """Locks a file, which is created if necessary; releases it when the context exits or the process ends.

        Args:
          path: path of the file.
          exclusive: False to open it without locking, where locks are not possible.

        Raises:
          BlockingIOError: another process has locked it, on any host.
          NotRegularFile: it is not a regular file, or has several names; a link is refused, too.
          OSError: files cannot be locked here.
        """

    # Directories

    @abc.abstractmethod
    def info(self, path: StoragePath) -> Info | None:
        """Returns information about the file or directory at a path; None if there is none."""

    @abc.abstractmethod
    def entries(self, directory: StoragePath) -> list[Entry]:
        """Returns the entries of a directory, in any order."""

    @abc.abstractmethod
    def make_directory(self, directory: StoragePath, *, is_new: bool = False) -> None:
        """Creates a directory and its parents, unless it exists; with `is_new` it must not, and its parent must."""

    @abc.abstractmethod
    def remove_directory(self, directory: StoragePath) -> None:
        """Removes a directory with all of its contents. If it fails, any part of them may be left."""

    @abc.abstractmethod
    def rename(self, path: StoragePath, target: StoragePath) -> None:
        """Renames a file, which replaces an existing one, or a directory, to a path that must not exist.

        The change is atomic: every process sees all of it under one of the two names.
        """

    @abc.abstractmethod
    def sync_directory(self, directory: StoragePath) -> None:
        """Returns when the entries of a directory are durable: all creations, renames and removals in it."""

    # The following methods have an implementation for every storage.

    def read(self, path: StoragePath) -> bytes:
        """Returns the contents of a file, which is opened by `open`; raises an `OSError` if it is larger than 1 GiB."""
        with self.open(path) as file:
            if file.size > _MAX_READ_BYTES:
                problem = f"it has {file.size} bytes, more than the largest allowed {_MAX_READ_BYTES}"
                raise OSError(errno.EFBIG, problem, str(path))
            return file.read(file.size)

    def copy_to(self, path: StoragePath, local: Path) -> None:
        """Copies a file, which is opened by `open` and may have any size, to a new one of this machine."""
        with self.open(path) as file, local.open("xb") as copy:
            for position in range(0, file.size, _COPY_BYTES):
                copy.write(file.read(_COPY_BYTES, position))

    def is_link(self, path: StoragePath) -> bool:
        """Returns whether a path is a link, whose target may be missing."""
        return False

    def check_writable(self, directory: StoragePath) -> None:
        """Raises an `OSError` if it is known that nothing could be created in a directory, which may be missing."""

    def resolved(self, path: StoragePath) -> StoragePath:
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
        """Yields a path of this machine with the same name, for libraries that write files or directories themselves.

        When the context exits without an error, the result is durable at `path`, where it replaces an existing file.
        """
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            written = Path(folder) / path.name
            yield written
            partial = path.with_name(f"{staged_prefix(path)}{secrets.token_hex(4)}")
            try:
                self._upload(written, partial)
                self.rename(partial, path)
                self.sync_directory(path.parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._remove_any(partial, self.is_directory(partial))
                raise

    def clean_staged(self, path: StoragePath) -> None:
        """Removes the remains of `staged(path)` in killed processes; must not be called while it is in use."""
        for entry in self.entries(path.parent):
            if entry.name.startswith(staged_prefix(path)):
                self._remove_any(path.with_name(entry.name), entry.is_directory)

    def _remove_any(self, path: StoragePath, is_directory: bool) -> None:
        (self.remove_directory if is_directory else self.remove)(path)

    def _upload(self, local: Path, path: StoragePath) -> None:
        if local.is_dir():
            self.make_directory(path, is_new=True)
            for inner in local.iterdir():
                self._upload(inner, path / inner.name)
            self.sync_directory(path)
            return
        with local.open("rb") as source, self.create(path) as file:
            for position in range(0, local.stat().st_size, _COPY_BYTES):
                file.write(source.read(_COPY_BYTES), position)


def staged_prefix(path: StoragePath) -> str:
    """Returns the prefix of the names of `Storage.staged` for incomplete files, in the directory of the path."""
    return f".{path.name}."
