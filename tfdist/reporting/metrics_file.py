"""metrics.jsonl: the record of a run for programs. `tfdist.reporting.schema` says what is in it."""

import json
import os
from collections.abc import Mapping

from tfdist.coordination import Json
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import SCHEMA, to_json
from tfdist.reporting.writing import GrowingFile


class MetricsFile(Reporter):
    """Appends each record to a file, as one line of JSON that is on its way to the disk when `record` returns.

    The file is therefore complete up to a crash, and up to the last `sync` when the machine goes. It exists from the start,
    also if nothing is ever recorded.

    Args:
      path: the file; it is made if it is not there, and continued if it is.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = GrowingFile(path)

    def start(self, plan: RunPlan) -> None:
        """See base class."""

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class.

        Raises:
          TypeError: a value is of a type that JSON does not have.
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
