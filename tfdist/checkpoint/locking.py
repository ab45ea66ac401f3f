"""One run in a directory: the second who wants to write there is told of the first."""

import contextlib
import datetime
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tfdist.errors import InputError

NAME = "lock"


@contextlib.contextmanager
def lock(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, no other process is inside for the same directory, on any host that shares it.

    The system gives the lock back when the process ends, whatever ends it.

    Args:
      directory: of a run; it is there.

    Raises:
      InputError: another process is inside, or there can be no lock.
    """
    path = Path(directory) / NAME
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "a+", encoding="utf-8"))  # not "w", which empties what is not ours
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _refused(path, error) from error
        started = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _refused(path: Path, error: OSError) -> InputError:
    if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
        return InputError(
            f"A run's directory must be one whose files can be locked. Received: {path}: {error.strerror}. "
            "Give another --output_dir."
        )
    holder = " ".join(path.read_text(encoding="utf-8", errors="replace").split())
    return InputError(
        f"One run at a time writes to a directory. Received: {path.parent}, where {holder or 'another process'} is at "
        "work. Wait for it, end it, or give another --output_dir."
    )
