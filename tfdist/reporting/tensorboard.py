"""Writes records as TensorBoard scalars, with training and evaluation as two runs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfdist.coordination import Json
from tfdist.reporting.file_errors import must_write
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import TRAIN, number
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

if TYPE_CHECKING:
    from tfdist.reporting.event_file import EventFile

_NOT_CURVES = ("schema", "kind", "step", "time")


class TensorBoardReporter(Reporter):
    """Writes every number of a record, named as in metrics.jsonl, so that both runs share their charts.

    Events are written before `record` returns. If a run resumes, TensorBoard ignores earlier values of repeated steps.

    Args:
      directory: directory for `tensorboard --logdir`; contains a run for each kind of record, `train` and `eval`.
    """

    def __init__(self, directory: AnyPath):
        self._directory = path_of(directory)
        self._files: dict[str, EventFile] = {}
        self._first: int | None = None

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        self._first = plan.first_step + 1

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        if "step" not in record:
            return
        kind = str(record.get("kind", TRAIN))
        with must_write(self._directory):
            if kind not in self._files:
                self._files[kind] = _new_file(self._directory / kind, self._first)
            for name, value in record.items():
                scalar = None if name in _NOT_CURVES else number(value)
                if scalar is not None:
                    self._files[kind].scalar(name, scalar, int(record["step"]), number(record.get("time")))

    def close(self, outcome: str) -> None:
        """See base class."""
        with must_write(self._directory):
            for file in self._files.values():
                file.close()
        self._files.clear()


def _new_file(directory: StoragePath, first: int | None) -> "EventFile":
    """Creates a file of events; if `first` is given, this step and later ones replace earlier values.

    TensorBoard ignores the first mark of a directory, but not later ones. The mark is in a separate file, between the
    existing events and those to come.
    """
    # Imported late, because TensorBoard imports TensorFlow.
    from tfdist.reporting.event_file import EventFile, last_name, new_name

    storage_of(directory).make_directory(directory)
    if first is not None:
        mark = EventFile(directory / f"{last_name(directory)}.start")
        mark.start(first)
        mark.close()
    return EventFile(directory / new_name(directory))
