"""Log files of the ranks."""

import contextlib
import datetime
import logging
import pathlib
import tempfile
from types import TracebackType

from tfdist.coordination import Group
from tfdist.errors import InputError
from tfdist.storage import AppendedFile, storage_of

PARENT = pathlib.Path("runs")

_log = logging.getLogger("tfdist.launch")


def log_directory(path: str, launchers: Group) -> pathlib.Path:
    """Creates the log directory and checks that it is writable.

    Args:
      path: value of the flag; empty for a new directory under runs/, created by node 0, with the same name on all
        nodes.
      launchers: group of the launchers of all nodes.

    Raises:
      InputError: the directory cannot be written.
    """
    try:
        fresh = launchers.broadcast("launch/log_dir", None if path or launchers.rank else str(_new_directory()))
        directory = pathlib.Path(path or fresh)
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InputError(
            f"--log_dir must be a writable directory. Received: {error.filename} ({error.strerror})."
        ) from error
    return directory


class Log:
    """A rank's log, unbuffered.

    If it cannot be written, as on a full disk, it is closed, and the job continues without it.
    """

    def __init__(self, path: pathlib.Path, number: int):
        """Opens the log for appending to the output of earlier attempts or launches; only a regular file is one.

        Args:
          path: path of the file.
          number: number of the attempt, 0 for the first.
        """
        self._path = path
        self._file: AppendedFile | None = None
        try:
            self._file = storage_of(path).append(path)
        except OSError as error:
            self._give_up(error)
        found = storage_of(path).info(path) if self._file else None
        if found and found.size:
            what = f"restart {number}" if number else "another launch"
            self.write(f"--- {what}, {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())

    def write(self, data: bytes) -> None:
        """Writes all data, or warns once that it cannot."""
        try:
            if self._file:
                self._file.write(data)
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close()

    def _give_up(self, error: OSError) -> None:
        self._close()
        _log.warning(
            "tfdist launch: %s can no longer be written (%s); the job continues without it.",
            self._path,
            error.strerror,
        )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file:
            with contextlib.suppress(OSError):  # some file systems report write errors here
                file.close()


def _new_directory() -> pathlib.Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = PARENT / f"launch-{now}{f'-{number}' if number > 1 else ''}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another launch in the same second
            number += 1
            continue
        return path
