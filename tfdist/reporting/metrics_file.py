"""Writes metrics.jsonl, the machine-readable record of a run, and outcome.json, the outcome of its last start."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping

from tfdist.coordination import Json
from tfdist.reporting.file_errors import GrowingFile, must_write
from tfdist.reporting.reporter import Reporter
from tfdist.reporting.schema import SCHEMA, to_json
from tfdist.storage import AnyPath, path_of, storage_of


class MetricsFile(Reporter):
    """Appends each record to a file, as one line of JSON.

    Records survive a crash of the process and, up to the last `sync`, of the machine. The file is created at the start,
    even if nothing is ever recorded.

    Args:
      path: path of the file, which is created or appended to.
    """

    def __init__(self, path: AnyPath):
        self._file = GrowingFile(path)

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class.

        Raises:
          TypeError: a value has a type without a JSON equivalent.
          WriteError: the file cannot be written.
        """
        line = {"schema": SCHEMA, **record}
        self._file.write(json.dumps(to_json(line), allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """See base class."""
        self._file.sync()

    def close(self, outcome: str) -> None:
        """See base class."""
        self._file.close()


class OutcomeFile(Reporter):
    """Writes the outcome of a run; while it is running, and after a kill, there is no such file.

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
