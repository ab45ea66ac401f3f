"""Writes outcome.json: how the last start of a run ended, for `tfdist runs`."""

import contextlib
import json
import time
from collections.abc import Callable

from tfdist.reporting.file_errors import must_write
from tfdist.reporting.reporter import Reporter
from tfdist.storage import AnyPath, path_of, storage_of


class OutcomeFile(Reporter):
    """Writes how a run ended; while it is running, and after a kill, there is no such file.

    Args:
      path: path of the file, in an existing directory.
      clock: returns the time in seconds since 1970 (UTC).
    """

    def __init__(self, path: AnyPath, clock: Callable[[], float] = time.time):
        self._path, self._clock = path_of(path), clock
        with must_write(path), contextlib.suppress(FileNotFoundError):
            storage_of(self._path).remove(self._path)

    def close(self, outcome: str) -> None:
        """See base class."""
        text = json.dumps({"outcome": outcome, "time": self._clock()})
        with must_write(self._path):
            storage_of(self._path).replace(self._path, f"{text}\n".encode())
