"""Writes metrics.jsonl, the machine-readable record of a run; `tfdist.reporting.schema` defines its contents."""

import json
from collections.abc import Mapping

from tfdist.coordination import Json
from tfdist.reporting.file_errors import GrowingFile
from tfdist.reporting.reporter import Reporter
from tfdist.reporting.schema import SCHEMA, to_json
from tfdist.storage import AnyPath


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
