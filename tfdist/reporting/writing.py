"""Writes the output files of a run; a file that cannot be written, as on a full disk, is a one-line error."""

import contextlib
import os
from collections.abc import Iterator

from tfdist.errors import WriteError
from tfdist.errors.engine_errors import one_line


@contextlib.contextmanager
def must_write(path: str | os.PathLike[str], also: type[Exception] = OSError) -> Iterator[None]:
    """Turns system errors in the body, which writes to a path, into `WriteError`.

    Args:
      path: path for the message.
      also: additional exception class that the writer raises for system errors, as TensorFlow does.

    Raises:
      WriteError: a system error occurred.
    """
    try:
        yield
    except (OSError, also) as error:
        raise WriteError(
            f"A run must be able to write its files as it goes. Received: {os.fspath(path)}: {cause(error)}. Free space, or "
            "repair the directory; the same command resumes from the last checkpoint, if there is one."
        ) from error


def cause(error: Exception) -> str:
    """Returns the system's error message. TensorFlow's has the form `PATH; No space left on device [Op:SaveV2]`."""
    said = getattr(error, "strerror", None) or one_line(str(error)).rpartition("; ")[2].partition(" [Op:")[0]
    return said.rstrip(".") or type(error).__name__


class GrowingFile:
    """A file to which a run appends; data survives the end of the process and, after `sync`, of the machine.

    Nothing is buffered: `close` does not retry what a full disk has refused, which would hide the first error.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_new: bool = False):
        """Creates the file if it does not exist.

        Args:
          path: path of the file, in an existing directory.
          is_new: whether it must not exist.

        Raises:
          WriteError: it cannot be created. The other methods raise it as well.
        """
        self._path = path
        with must_write(path):
            self._file = open(path, "xb" if is_new else "ab", buffering=0)  # noqa: SIM115 (closed by `close`)

    def write(self, data: bytes) -> None:
        """Appends all bytes."""
        left = memoryview(data)
        with must_write(self._path):
            while left:
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Flushes the file to disk."""
        with must_write(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with must_write(self._path):
            self._file.close()
