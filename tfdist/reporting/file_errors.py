"""Writes the output files of a run; a file that cannot be written, as on a full disk, is a one-line error."""

import contextlib
from collections.abc import Iterator

from tfdist.errors import InputError, WriteError
from tfdist.errors.engine_errors import one_line
from tfdist.storage import AnyPath, path_of, storage_of


@contextlib.contextmanager
def must_write(path: AnyPath) -> Iterator[None]:
    """Turns system errors in the body, which writes to a path, into `WriteError`.

    Args:
      path: path for the message.

    Raises:
      WriteError: a system error occurred.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"A run must be able to write its files during training. Received: {path}: {cause(error)}. Free space, or "
            "repair the directory; the same command resumes from the last checkpoint, if there is one."
        ) from error


@contextlib.contextmanager
def must_write_output(path: AnyPath) -> Iterator[None]:
    """Turns system errors in the body, which writes the file that `--output` names, into `InputError`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--output must be a writable path. Received: {path} ({cause(error)}). Give another --output, or free space or fix "
            "the permissions there."
        ) from error


def cause(error: Exception) -> str:
    """Returns the system's error message. TensorFlow's has the form `PATH; No space left on device [Op:SaveV2]`."""
    message = getattr(error, "strerror", None) or one_line(str(error)).rpartition("; ")[2].partition(" [Op:")[0]
    return message.rstrip(".") or type(error).__name__


class GrowingFile:
    """A file to which a run appends; data survives the end of the process and, after `sync`, of the machine."""

    def __init__(self, path: AnyPath, *, is_new: bool = False):
        """Creates the file if it does not exist.

        Args:
          path: path of the file, in an existing directory.
          is_new: whether it must not exist.

        Raises:
          WriteError: it cannot be created. The other methods raise it as well.
        """
        self._path = path
        with must_write(path):
            self._file = storage_of(path).append(path_of(path), is_new=is_new)

    def write(self, data: bytes) -> None:
        """Appends all bytes."""
        with must_write(self._path):
            self._file.write(data)

    def sync(self) -> None:
        """Flushes the file to disk."""
        with must_write(self._path):
            self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        with must_write(self._path):
            self._file.close()


@contextlib.contextmanager
def must_enter() -> Iterator[None]:
    """Context, or decorator, that raises an `InputError` if the directory of a run may not be entered."""
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"The directory of a run must be one that may be entered. Received: {error.filename} ({error.strerror}). Give "
            "another one, or fix its permissions."
        ) from error
