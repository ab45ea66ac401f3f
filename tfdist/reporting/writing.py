"""The files that a run writes as it goes: one that cannot be written, as on a full disk, is an error of one line."""

import contextlib
import os
from collections.abc import Iterator

from tfdist.errors import WriteError
from tfdist.errors.engine_errors import one_line


@contextlib.contextmanager
def must_write(path: str | os.PathLike[str], also: type[Exception] = OSError) -> Iterator[None]:
    """Around what writes to a path.

    Args:
      path: is named in the message.
      also: what else the writer raises for what the system says, as TensorFlow does.

    Raises:
      WriteError: the system refuses.
    """
    try:
        yield
    except (OSError, also) as error:
        raise WriteError(
            f"A run must be able to write its files as it goes. Received: {os.fspath(path)}: {cause(error)}. Free space, or "
            "mend the directory; the same command goes on from the last checkpoint, if there is one."
        ) from error


def cause(error: Exception) -> str:
    """What the system said, in its words. TensorFlow says `PATH; No space left on device [Op:SaveV2]`."""
    said = getattr(error, "strerror", None) or one_line(str(error)).rpartition("; ")[2].partition(" [Op:")[0]
    return said.rstrip(".") or type(error).__name__


class GrowingFile:
    """A file to which a run appends: what was written survives the process, and behind `sync` the machine.

    Nothing is kept back: what a full disk has refused is not tried again by `close`, which would hide the first error.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_new: bool = False):
        """Makes the file if it is not there.

        Args:
          path: of the file, in a directory that is there.
          is_new: whether it must not be there.

        Raises:
          WriteError: it cannot be made. All that follows raises it, too.
        """
        self._path = path
        with must_write(path):
            self._file = open(path, "xb" if is_new else "ab", buffering=0)  # noqa: SIM115 (closed by `close`)

    def write(self, data: bytes) -> None:
        """Appends all of it."""
        left = memoryview(data)
        with must_write(self._path):
            while left:
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Returns when everything is on the disk."""
        with must_write(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the file."""
        with must_write(self._path):
            self._file.close()
