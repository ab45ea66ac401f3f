"""Writes files of TensorBoard events to any storage. To be imported late, because TensorBoard imports TensorFlow."""

import itertools
import os
import socket
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from tfdist.storage import StoragePath, storage_of

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
