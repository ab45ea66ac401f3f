"""Writes records as TensorBoard scalars, with training and evaluation as two runs."""

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

_EVENTS = "events.out.tfevents"  # prefix of TensorBoard's file names
_NO_EVENTS = f"{_EVENTS}.0"  # sorts before all of them, whose prefix is followed by a time
_NOT_CURVES = ("schema", "kind", "step", "time")


class TensorBoardReporter(Reporter):
    """Writes every number of a record, named as in metrics.jsonl, so that both runs share their charts.

    Uses TensorBoard's own writer, which runs no TensorFlow operations. Records are flushed before `record` returns. If
    a run resumes, TensorBoard ignores earlier values of repeated steps.

    Args:
      directory: directory for `tensorboard --logdir`; contains a run for each kind of record, `train` and `eval`.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        # Imported late, because TensorBoard imports TensorFlow for its file system.
        import tensorboard.summary
        import tensorflow as tf

        self._open = tensorboard.summary.Writer
        self._failure = tf.errors.OpError  # a full disk raises ResourceExhaustedError, as does insufficient memory
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
    """Marks, after the existing events of a directory, that this step and later ones replace earlier values.

    TensorBoard ignores the first mark of a directory, but not later ones. Its writer does not support marks, so this is
    a separate file; files are read in the order of their names.
    """
    import tensorflow as tf

    os.makedirs(directory, exist_ok=True)
    last = max([_NO_EVENTS, *(name for name in os.listdir(directory) if name.startswith(_EVENTS))])
    event, log, now = tf.compat.v1.Event, tf.compat.v1.SessionLog, time.time()
    with tf.io.TFRecordWriter(os.path.join(directory, f"{last}.start")) as file:
        file.write(event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        file.write(event(wall_time=now, step=first, session_log=log(status=log.START)).SerializeToString())
