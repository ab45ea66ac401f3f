"""Locks the directory of a run, or of its checkpoints: a second writer gets an error that names the first."""

import contextlib
import datetime
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tfdist.checkpoint.storage import files
from tfdist.errors import InputError

NAME = "lock"


class NoLock(InputError):
    """The directory cannot be locked, whether or not it is in use."""


class Holder:
    """Describes the process that holds a lock, in the lock file. For information only: the lock does not depend on it.

    Attributes:
      is_told: whether the description has been written.
    """

    def __init__(self, file: IO[bytes]):
        """Initializes with the unbuffered lock `file`."""
        self._file = file
        started = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        self._words = f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode()
        self.is_written_down = False

    def tell(self) -> None:
        """Writes the description for other hosts to read, unless that is done; it may fail on a full disk."""
        if self.is_written_down:
            return
        try:
            self._file.truncate(0)
            files.write(self._file.fileno(), self._words, 0)
            # The file stays open, and NFS shows changes to others only after close or fsync.
            os.fsync(self._file.fileno())
            self.is_written_down = True
        except OSError:
            self.clear()  # an incomplete description would be misread

    def clear(self) -> None:
        """Removes the description."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)


@contextlib.contextmanager
def lock(directory: str | os.PathLike[str], remedy: str = "give another --output_dir") -> Iterator[Holder]:
    """Locks a directory against other processes, on any host that shares it.

    The system releases the lock when the process ends for any reason.

    Args:
      directory: existing directory of a run, or of its checkpoints.
      remedy: what to do if it is locked, as the end of a sentence.

    Yields:
      The description of this process, which may not have been written yet.

    Raises:
      InputError: another process holds the lock.
      NoLock: the directory cannot be locked.
    """
    with _opened(directory, remedy) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _refused(Path(directory) / NAME, error, remedy) from error
        with _told(file) as holder:
            yield holder


@contextlib.contextmanager
def unlocked(directory: str | os.PathLike[str], remedy: str = "give another --output_dir") -> Iterator[Holder]:
    """Like `lock`, for directories whose files cannot be locked: writes the description, but excludes nobody.

    Raises:
      NoLock: the file cannot be opened either.
    """
    with _opened(directory, remedy) as file, _told(file) as holder:
        yield holder


@contextlib.contextmanager
def _opened(directory: str | os.PathLike[str], remedy: str) -> Iterator[IO[bytes]]:
    path = Path(directory) / NAME
    try:
        file = open(path, "a+b", buffering=0)  # not "w", which would truncate another process's file
    except OSError as error:
        raise _refused(path, error, remedy) from error
    with file:
        yield file


@contextlib.contextmanager
def _told(file: IO[bytes]) -> Iterator[Holder]:
    holder = Holder(file)
    holder.tell()
    try:
        yield holder
    finally:
        holder.clear()


def _refused(path: Path, error: OSError, remedy: str) -> InputError:
    if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
        return NoLock(
            f"A run's directory must be one whose files can be locked. Received: {path}: {error.strerror}. "
            f"{remedy[0].upper()}{remedy[1:]}."
        )
    holder = " ".join(path.read_text(encoding="utf-8", errors="replace").split())
    return InputError(
        f"One run at a time writes to a directory. Received: {path.parent}, where {holder or 'another process'} is at "
        f"work. Wait for it, end it, or {remedy}."
    )
