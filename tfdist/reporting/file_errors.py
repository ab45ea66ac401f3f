"""Writes output files, and raises one-line errors for failures such as a full disk."""

import contextlib
from collections.abc import Iterator

from tfdist.errors import InputError, WriteError, one_line
from tfdist.storage import AnyPath, path_of, storage_of


@contextlib.contextmanager
def reraise_as_write_error(path: AnyPath) -> Iterator[None]:
    """Raises `WriteError` for system errors in the body, which writes to `path`."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"A run must be able to write its files during training. Received: {path}: {cause(error)}. Free up "
            "disk space, or repair the directory; the same command resumes from the last checkpoint, if there is one."
        ) from error


@contextlib.contextmanager
def reraise_as_output_error(path: AnyPath) -> Iterator[None]:
    """Raises `InputError` for system errors in the body, which writes the file of `--output`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--output must be a writable path. Received: {path} ({cause(error)}). Specify another --output, or free up "
            "space or fix the permissions there."
        ) from error


def cause(error: Exception) -> str:
    """Returns the system's error message; TensorFlow's errors are of the form `PATH; No space left on device [Op:SaveV2]`."""
    message = getattr(error, "strerror", None) or one_line(str(error)).rpartition("; ")[2].partition(" [Op:")[0]
    return message.rstrip(".") or type(error).__name__


class AppendOnlyFile:
    """A file to which a run appends; data survives a crash of the process and, after `sync`, a crash of the machine."""

    def __init__(self, path: AnyPath, *, is_new: bool = False):
        """Creates the file if it does not exist; if `is_new`, it must not exist, and its directory is also created.

        Raises:
          WriteError: the file cannot be created. The other methods also raise this error.
        """
        self._path, storage = path, storage_of(path)
        with reraise_as_write_error(path):
            if is_new:
                storage.make_directory(path_of(path).parent)
            self._file = storage.append(path_of(path), is_new=is_new)

    def write(self, data: bytes) -> None:
        """Appends all bytes."""
        with reraise_as_write_error(self._path):
            self._file.write(data)

    def sync(self) -> None:
        """Flushes the file to disk."""
        with reraise_as_write_error(self._path):
            self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        with reraise_as_write_error(self._path):
            self._file.close()


@contextlib.contextmanager
def reraise_as_access_error() -> Iterator[None]:
    """Context or decorator that raises `InputError` if the directory of a run may not be accessed."""
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"The directory of a run must be accessible. Received: {error.filename} ({error.strerror}). Use "
            "another directory, or fix its permissions."
        ) from error
