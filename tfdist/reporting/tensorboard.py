"""Writes records as TensorBoard scalars, with training and evaluation as two runs."""

import itertools
import os
import socket
import time
from collections.abc import Mapping

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from tfdist.coordination import Json
from tfdist.reporting.file_errors import reraise_as_write_error
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import TRAIN, number, scalars
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

_PREFIX = "events.out.tfevents"
_NO_EVENTS = f"{_PREFIX}.0"  # sorts before all names of event files
_VERSION = "brain.Event:2"


class EventFile:
    """A new event file; written events survive a crash of the process."""

    def __init__(self, path: StoragePath):
        """Creates the file, which must not exist, in an existing directory."""
        self._file = storage_of(path).append(path, is_new=True)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=_VERSION))

    def scalar(self, name: str, value: float, step: int, wall_time: float | None) -> None:
        """Writes a scalar; `wall_time` is in seconds since 1970 (UTC), by default now."""
        self._write_summary(scalar_pb(name, value), step, wall_time)

    def histogram(self, name: str, counts: Mapping[str, int], step: int, wall_time: float | None) -> None:
        """Writes a histogram with a bucket for each integer, from the counts by integer."""
        values = sorted(map(int, counts))
        data = np.repeat(values, [counts[str(value)] for value in values])
        buckets = values[-1] - values[0] + 1 if values else 1
        self._write_summary(histogram_pb(name, data, buckets), step, wall_time)

    def _write_summary(self, summary: Summary, step: int, wall_time: float | None) -> None:
        event_time = time.time() if wall_time is None else wall_time
        self._write(Event(wall_time=event_time, step=step, summary=summary))

    def start(self, step: int) -> None:
        """Marks that values of this step and later ones replace earlier ones in the directory."""
        self._write(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def new_name(directory: StoragePath) -> str:
    """Returns a name for a new file in a directory; TensorBoard reads files in the order of their names."""
    storage = storage_of(directory)
    prefix = f"{_PREFIX}.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    return next(name for n in itertools.count() if not storage.exists(directory / (name := f"{prefix}.{n}")))


def last_name(directory: StoragePath) -> str:
    """Returns the name of the last event file of a directory, or a name that sorts before all others."""
    names = (entry.name for entry in storage_of(directory).entries(directory))
    return max([_NO_EVENTS, *(name for name in names if name.startswith(_PREFIX))])


class TensorBoardReporter(Reporter):
    """Writes every number of a record, with the names in metrics.jsonl, so both runs share their charts.

    Numbers of workers and servers have names such as `workers/0/updates_per_second`; histograms, `servers/0/staleness`.

    Events are written before `record` returns. After a run resumes, TensorBoard ignores earlier values of repeated steps.

    Args:
      directory: directory for `tensorboard --logdir`; contains a run for each kind of record, `train` and `eval`.
    """

    def __init__(self, directory: AnyPath):
        self._directory = path_of(directory)
        self._files: dict[str, EventFile] = {}
        self._first_step: int | None = None

    def start(self, plan: RunPlan) -> None:
        self._first_step = plan.first_step + 1

    def record(self, record: Mapping[str, Json]) -> None:
        if "step" not in record:
            return
        kind = str(record.get("kind", TRAIN))
        with reraise_as_write_error(self._directory):
            if kind not in self._files:
                self._files[kind] = _new_file(self._directory / kind, self._first_step)
            when = int(record["step"]), number(record.get("time"))
            for name, scalar in scalars(record):
                self._files[kind].scalar(name, scalar, *when)
            for server, counts in enumerate(record.get("staleness_histogram", ())):
                self._files[kind].histogram(f"servers/{server}/staleness", counts, *when)

    def close(self, outcome: str) -> None:
        with reraise_as_write_error(self._directory):
            for file in self._files.values():
                file.close()
        self._files.clear()


def _new_file(directory: StoragePath, first_step: int | None) -> "EventFile":
    """Creates an event file; if `first_step` is given, this step and later ones replace earlier values.

    The mark for this is in a separate file between earlier and later events, because TensorBoard ignores the first mark of a
    directory.
    """
    # Imported late, because TensorBoard imports TensorFlow.

    storage_of(directory).make_directory(directory)
    if first_step is not None:
        mark = EventFile(directory / f"{last_name(directory)}.start")
        mark.start(first_step)
        mark.close()
    return EventFile(directory / new_name(directory))
