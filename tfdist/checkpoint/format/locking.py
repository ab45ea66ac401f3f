"""Locks the directory of a run, or of its checkpoints: a second writer gets an error that names the first."""

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator

from tfdist.errors import InputError
from tfdist.storage import AnyPath, LockFile, StoragePath, path_of, storage_of

NAME = "lock"


class NoLock(InputError):
    """The directory cannot be locked, whether or not it is in use."""


class Holder:
    """Describes the process that holds a lock, in the lock file. For information only: the lock does not depend on it.

    Attributes:
      is_written_down: whether the description has been written.
    """

    def __init__(self, file: LockFile):
        """Initializes with the lock `file`."""
        self._file = file
        started = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        self._words = f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode()
        self.is_written_down = False

    def write_owner(self) -> None:
        """Writes the description for other hosts to read, unless that is done; it may fail on a full disk."""
        if self.is_written_down:
            return
        try:
            self._file.write(self._words)
            self.is_written_down = True
        except OSError:
            self.clear()  # an incomplete description would be misread

    def clear(self) -> None:
        """Removes the description."""
        with contextlib.suppress(OSError):
            self._file.clear()


@contextlib.contextmanager
def lock(directory: AnyPath, remedy: str = "give another --output_dir") -> Iterator[Holder]:
    """Locks a directory against other processes, on any host that shares it.

    The lock is released when the process ends for any reason.

    Args:
      directory: existing directory of a run, or of its checkpoints.
      remedy: what to do if it is locked, as the end of a sentence.

    Yields:
      The description of this process, which may not have been written yet.

    Raises:
      InputError: another process holds the lock.
      NoLock: the directory cannot be locked.
    """
    with _opened(directory, remedy, exclusive=True) as holder:
        yield holder


@contextlib.contextmanager
def unlocked(directory: AnyPath, remedy: str = "give another --output_dir") -> Iterator[Holder]:
    """Like `lock`, for directories whose files cannot be locked: writes the description, but does not exclude others.

    Raises:
      NoLock: the file cannot be opened either.
    """
    with _opened(directory, remedy, exclusive=False) as holder:
        yield holder


@contextlib.contextmanager
def _opened(directory: AnyPath, remedy: str, exclusive: bool) -> Iterator[Holder]:
    path = path_of(directory) / NAME
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(storage_of(path).lock(path, exclusive=exclusive))
        except BlockingIOError as error:
            raise _in_use(path, remedy) from error
        except OSError as error:
            raise NoLock(
                f"The directory of a run must support file locks. Received: {path}: {error.strerror}. "
                f"{remedy[0].upper()}{remedy[1:]}."
            ) from error
        holder = Holder(file)
        holder.write_owner()
        stack.callback(holder.clear)
        yield holder


def _in_use(path: StoragePath, remedy: str) -> InputError:
    holder = " ".join(storage_of(path).read(path).decode(errors="replace").split())
    return InputError(
        f"Only one run at a time can write to a directory. Received: {path.parent}, which "
        f"{holder or 'another process'} is using. Wait for it, end it, or {remedy}."
    )
