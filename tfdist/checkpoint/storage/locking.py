"""One run in a directory, and one in its checkpoints: the second who wants to write there is told of the first."""

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
    """There can be no lock in a directory, whoever is at work there."""


class Holder:
    """Who is inside, in words that stand in the lock's file. They are a courtesy: the lock holds without them, too.

    Attributes:
      is_told: whether they are there.
    """

    def __init__(self, file: IO[bytes]):
        """Args: file: of the lock, which is held; not buffered."""
        self._file = file
        started = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        self._words = f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode()
        self.is_told = False

    def tell(self) -> None:
        """Writes the words, if they are not there, for every host to read; a disk may be too full for that."""
        if self.is_told:
            return
        try:
            self._file.truncate(0)
            files.write(self._file.fileno(), self._words, 0)
            os.fsync(self._file.fileno())  # the file stays open, and NFS shows to others what is closed or synchronized
            self.is_told = True
        except OSError:
            self.clear()  # half of them would be misread

    def clear(self) -> None:
        """Takes the words back."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)


@contextlib.contextmanager
def lock(directory: str | os.PathLike[str], remedy: str = "give another --output_dir") -> Iterator[Holder]:
    """Inside, no other process is inside for the same directory, on any host that shares it.

    The system gives the lock back when the process ends, whatever ends it.

    Args:
      directory: of a run, or of its checkpoints; it is there.
      remedy: what is to be done otherwise, as the end of a sentence.

    Yields:
      What others read of this process; it may not be told yet.

    Raises:
      InputError: another process is inside.
      NoLock: there can be no lock.
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
    """As `lock`, where files cannot be locked: the words are there, and keep nobody out.

    Raises:
      NoLock: the file cannot be opened either.
    """
    with _opened(directory, remedy) as file, _told(file) as holder:
        yield holder


@contextlib.contextmanager
def _opened(directory: str | os.PathLike[str], remedy: str) -> Iterator[IO[bytes]]:
    path = Path(directory) / NAME
    try:
        file = open(path, "a+b", buffering=0)  # not "w", which empties what is not ours
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
