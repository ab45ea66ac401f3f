"""TensorBoard events: the records as scalars, training and evaluation as two runs of one board."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfdist.group import Json
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import TRAIN, number

if TYPE_CHECKING:
    from tensorboard.summary import Writer

_NOT_CURVES = ("schema", "kind", "step", "time")


class TensorBoardReporter(Reporter):
    """Writes every number of a record, under its name in metrics.jsonl, so that both runs share their charts.

    It uses TensorBoard's own writer: no TensorFlow operation runs, on any device. What was recorded is in the file when
    `record` returns.

    Args:
      directory: what to give to `tensorboard --logdir`; holds one run for each kind of record, `train` and `eval`.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        # TensorBoard asks TensorFlow for its file system, so only who wants events pays for the import.
        import tensorboard.summary

        self._open = tensorboard.summary.Writer
        self._directory = os.fspath(directory)
        self._writers: dict[str, Writer] = {}

    def start(self, plan: RunPlan) -> None:
        """See base class."""

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        if "step" not in record:
            return
        kind = str(record.get("kind", TRAIN))
        if kind not in self._writers:
            self._writers[kind] = self._open(os.path.join(self._directory, kind))
        writer = self._writers[kind]
        for name, value in record.items():
            scalar = None if name in _NOT_CURVES else number(value)
            if scalar is not None:
                writer.add_scalar(name, scalar, int(record["step"]), wall_time=number(record.get("time")))
        writer.flush()

    def close(self, outcome: str) -> None:
        """See base class."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
