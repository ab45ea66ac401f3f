"""Writes records as TensorBoard scalars, with training and evaluation as two runs."""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from tfdist.coordination import Json
from tfdist.reporting.file_errors import reraise_as_write_error
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import TRAIN, as_float, scalars
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
        self.write(file_version=_VERSION)

    def write(self, wall_time: float | None = None, **fields: Any) -> None:
        """Writes an event; `wall_time` is in seconds since 1970 (UTC), by default now."""
        event = Event(wall_time=time.time() if wall_time is None else wall_time, **fields)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _histogram(name: str, counts: Mapping[str, int]) -> Summary:
    """Returns a histogram with a bucket for each integer, from the counts by integer."""
    values = sorted(map(int, counts))
    data = np.repeat(values, [counts[str(value)] for value in values])
    return histogram_pb(name, data, values[-1] - values[0] + 1 if values else 1)


class TensorBoardReporter(Reporter):
    """Writes every number of a record, with the names in metrics.jsonl, so training and evaluation share charts.

    Numbers of workers and servers have names such as `workers/0/updates_per_second`; histograms, `servers/0/staleness`.

    Events are written before `record` returns. After a run resumes, TensorBoard ignores earlier values of repeated steps. The
    directory, for `tensorboard --logdir`, contains a run for each kind of record, `train` and `eval`.
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
            histograms = enumerate(record.get("staleness_histogram", ()))
            summaries = [scalar_pb(name, scalar) for name, scalar in scalars(record)]
            summaries += [_histogram(f"servers/{server}/staleness", counts) for server, counts in histograms]
            for summary in summaries:
                self._files[kind].write(as_float(record.get("time")), step=int(record["step"]), summary=summary)

    def close(self, outcome: str) -> None:
        with reraise_as_write_error(self._directory):
            for file in self._files.values():
                file.close()
        self._files.clear()


def _new_file(directory: StoragePath, first_step: int | None) -> "EventFile":
    """Creates an event file; if `first_step` is not None, this step and later ones replace earlier values.

    The mark for this is in a separate file between earlier and later events, because TensorBoard ignores the first mark of a
    directory. It reads files in the order of their names.
    """
    storage = storage_of(directory)
    storage.make_directory(directory)
    if first_step is not None:
        last_name = max([_NO_EVENTS, *(name for name, _ in storage.entries(directory) if name.startswith(_PREFIX))])
        mark = EventFile(directory / f"{last_name}.start")
        mark.write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        mark.close()
    prefix = f"{_PREFIX}.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    return EventFile(next(p for n in itertools.count() if not storage.exists(p := directory / f"{prefix}.{n}")))
