"""Writes records as TensorBoard scalars, with training and evaluation as two runs."""

import itertools
import os
import socket
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from tfdist.coordination import Json
from tfdist.reporting.file_errors import must_write
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import TRAIN, number
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

_PREFIX = "events.out.tfevents"
_NO_EVENTS = f"{_PREFIX}.0"  # sorts before all files of events, whose prefix is followed by a time
_VERSION = "brain.Event:2"


class EventFile:
    """A new file of events; they survive the end of the process."""

    def __init__(self, path: StoragePath):
        """Creates the file, which must not exist, in an existing directory."""
        self._file = storage_of(path).append(path, is_new=True)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=_VERSION))

    def scalar(self, name: str, value: float, step: int, wall_time: float | None) -> None:
        """Writes a scalar; `wall_time` is in seconds since 1970 (UTC), by default now."""
        when = time.time() if wall_time is None else wall_time
        self._write(Event(wall_time=when, step=step, summary=scalar_pb(name, value)))

    def start(self, step: int) -> None:
        """Marks that this step and later ones replace earlier values of the directory."""
        self._write(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def new_name(directory: StoragePath) -> str:
    """Returns a name for another file of a directory; files are read in the order of their names."""
    storage = storage_of(directory)
    begin = f"{_PREFIX}.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    return next(name for n in itertools.count() if not storage.exists(directory / (name := f"{begin}.{n}")))


def last_name(directory: StoragePath) -> str:
    """Returns the name of the last file of a directory, or one that sorts before all names."""
    names = (entry.name for entry in storage_of(directory).entries(directory))
    return max([_NO_EVENTS, *(name for name in names if name.startswith(_PREFIX))])


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

    storage_of(directory).make_directory(directory)
    if first is not None:
        mark = EventFile(directory / f"{last_name(directory)}.start")
        mark.start(first)
        mark.close()
    return EventFile(directory / new_name(directory))
