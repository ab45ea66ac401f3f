"""TensorBoard events: the records as scalars, training and evaluation as two runs of one board."""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfdist.coordination import Json
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import TRAIN, number
from tfdist.reporting.writing import must_write

if TYPE_CHECKING:
    from tensorboard.summary import Writer

_EVENTS = "events.out.tfevents"  # how the names of TensorBoard's files begin
_NO_EVENTS = f"{_EVENTS}.0"  # less than all of them: behind the point is a time
_NOT_CURVES = ("schema", "kind", "step", "time")


class TensorBoardReporter(Reporter):
    """Writes every number of a record, under its name in metrics.jsonl, so that both runs share their charts.

    It uses TensorBoard's own writer: no TensorFlow operation runs, on any device. What was recorded is in the file when
    `record` returns. Where a run goes on, TensorBoard leaves out what was written before of steps
    that are made again.

    Args:
      directory: what to give to `tensorboard --logdir`; holds one run for each kind of record, `train` and `eval`.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        # TensorBoard asks TensorFlow for its file system, so only who wants events pays for the import.
        import tensorboard.summary
        import tensorflow as tf

        self._open = tensorboard.summary.Writer
        self._failure = tf.errors.OpError  # a full disk is ResourceExhaustedError, as a full memory is
        self._directory = os.fspath(directory)
        self._writers: dict[str, Writer] = {}
        self._first: int | None = None

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        self._first = plan.first_step + 1

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        if "step" not in record:
            return
        kind = str(record.get("kind", TRAIN))
        with must_write(self._directory, self._failure):
            writer = self._writer(kind)
            for name, value in record.items():
                scalar = None if name in _NOT_CURVES else number(value)
                if scalar is not None:
                    writer.add_scalar(name, scalar, int(record["step"]), wall_time=number(record.get("time")))
            writer.flush()

    def _writer(self, kind: str) -> "Writer":
        if kind not in self._writers:
            directory = os.path.join(self._directory, kind)
            if self._first is not None:
                _mark_start(directory, self._first)
            self._writers[kind] = self._open(directory)
        return self._writers[kind]

    def close(self, outcome: str) -> None:
        """See base class."""
        with must_write(self._directory, self._failure):
            for writer in self._writers.values():
                writer.close()
        self._writers.clear()


def _mark_start(directory: str, first: int) -> None:
    """Says behind the events that are in a directory that from this step on others follow in their place.

    The first mark of a board means nothing to TensorBoard, the later ones do. Its writer cannot write one, so that it is a
    file of its own; files are read in the order of their names.
    """
    import tensorflow as tf

    os.makedirs(directory, exist_ok=True)
    last = max([_NO_EVENTS, *(name for name in os.listdir(directory) if name.startswith(_EVENTS))])
    event, log, now = tf.compat.v1.Event, tf.compat.v1.SessionLog, time.time()
    with tf.io.TFRecordWriter(os.path.join(directory, f"{last}.start")) as file:
        file.write(event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        file.write(event(wall_time=now, step=first, session_log=log(status=log.START)).SerializeToString())
