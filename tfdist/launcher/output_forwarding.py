"""Forwards the ranks' output to the launcher's output and to logs; reads the ranks' progress files."""

import contextlib
import datetime
import errno
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, BinaryIO, TextIO

from tfdist.cluster import progress_file
from tfdist.cluster.terminal import StatusLine
from tfdist.coordination import Group
from tfdist.errors import InputError
from tfdist.launcher.child import EVALUATOR_RANK
from tfdist.storage import AppendedFile, storage_of

MAX_LINE_BYTES = 1 << 16  # longer lines are split


class LineSplitter:
    """Splits a stream of bytes into lines.

    Text that ends in a carriage return, such as a progress bar, is a state that will be overwritten. Of a line, only the last
    state is yielded.
    """

    def __init__(self) -> None:
        self._pending = b""

    @property
    def current_state(self) -> bytes:
        """The last state of the incomplete line."""
        return _last_state(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the lines that `data` completes, without line ends."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield _last_state(line)
        text = self._pending.rstrip(b"\r")  # a carriage return at the end may be the first half of \r\n
        self._pending = text.rpartition(b"\r")[2] + self._pending[len(text) :]
        while len(self._pending) > MAX_LINE_BYTES:
            yield self._pending[:MAX_LINE_BYTES]
            self._pending = self._pending[MAX_LINE_BYTES:]

    def end(self) -> Iterator[bytes]:
        """Yields the remaining text at the end of the stream."""
        if self._pending:
            yield _last_state(self._pending)
            self._pending = b""


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


RUNS_DIRECTORY = pathlib.Path("runs")

_log = logging.getLogger("tfdist.launch")


def log_directory(path: str, launchers: Group) -> pathlib.Path:
    """Creates the log directory and checks that it is writable; by default, a new directory under runs/.

    Raises:
      InputError: the directory cannot be written.
    """
    try:
        new_path = launchers.broadcast("launch/log_dir", None if path or launchers.rank else str(_new_directory()))
        directory = pathlib.Path(path or new_path)
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InputError(
            f"--log_dir must be a writable directory. Received: {error.filename} ({error.strerror})."
        ) from error
    return directory


class Log:
    """The unbuffered log of a rank, appended to the output of earlier attempts or launches.

    If it cannot be written, as on a full disk, it is closed, and the job continues without it.
    """

    def __init__(self, path: pathlib.Path, attempt_index: int):
        self._path = path
        self._file: AppendedFile | None = None
        try:
            self._file = storage_of(path).append(path)
        except OSError as error:
            self._give_up(error)
        info = storage_of(path).info(path) if self._file else None
        if info and info.size:
            title = f"restart {attempt_index}" if attempt_index else "another launch"
            self.write(f"--- {title}, {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())

    def write(self, data: bytes) -> None:
        """Writes data; logs a warning on the first failure."""
        try:
            if self._file:
                self._file.write(data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        _log.warning(
            "tfdist launch: %s can no longer be written (%s); the job continues without it.",
            self._path,
            error.strerror,
        )

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file:
            with contextlib.suppress(OSError):  # some file systems report write errors here
                file.close()


def _new_directory() -> pathlib.Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = RUNS_DIRECTORY / f"launch-{now}{f'-{number}' if number > 1 else ''}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another launch in the same second
            number += 1
            continue
        return path


_CHUNK = 1 << 16
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)


def prefix(rank: int) -> str:
    """Returns the prefix of a rank's lines."""
    return "[evaluator] " if rank == EVALUATOR_RANK else f"[{rank}] "


class Screen:
    """Writes complete lines to an output stream; drops output if the disk is full.

    Args:
      stream: a console, a file, or the output of a notebook, which has no underlying byte stream.
      status: status line of the stream's terminal, if any.

    Attributes:
      is_broken: whether the stream has lost its reader, as with `| head` or a closed terminal.
    """

    def __init__(self, stream: TextIO, status: StatusLine | None = None):
        self._stream = stream
        self._bytes: BinaryIO | None = getattr(stream, "buffer", None)
        self._status = status
        self.is_broken = False

    def write(self, line: bytes) -> None:
        """Writes one line, above the status line."""
        if self.is_broken:
            return
        with self._status.hide() if self._status else contextlib.nullcontext():
            try:
                if self._bytes:
                    self._stream.flush()  # keeps the order with earlier prints
                    self._bytes.write(line + b"\n")
                    self._bytes.flush()
                else:
                    self._stream.write(line.decode(errors="replace") + "\n")
                    self._stream.flush()
            # A closed terminal (EIO) must not end the launcher while ranks are saving.
            except OSError as error:
                self.is_broken = error.errno not in _STORAGE_ERRORS


class Channel:
    """Copies an output of a rank from a pipe to a screen and a log.

    Args:
      rank: rank of the process.
      pipe: read end, owned by the channel.
      screen: receives the lines.
      log: receives the unmodified bytes or, with `status`, the complete lines.
      status: receives the incomplete line, such as a progress bar.
    """

    def __init__(self, rank: int, pipe: IO[bytes], screen: Screen, log: Log, status: StatusLine | None = None):
        self._prefix = prefix(rank).encode()
        self._pipe, self._screen, self._log, self._status = pipe, screen, log, status
        self._lines = LineSplitter()
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Returns the file descriptor, for a selector."""
        return self._pipe.fileno()

    def forward(self) -> bool:
        """Forwards available data; returns whether there may be more."""
        try:
            data = os.read(self.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if self._status is None:
            self._log.write(data)
            self._write_lines(self._lines.feed(data))
        else:
            for line in self._lines.feed(data):
                self._status.set(b"")
                self._write_lines([line.rstrip()])  # without the spaces that erase a progress bar
            self._status.set(self._lines.current_state)
        return bool(data)

    def close(self) -> None:
        """Forwards an incomplete last line, and closes the pipe."""
        if self._status is not None:
            self._status.set(b"")
        self._write_lines(self._lines.end())
        self._pipe.close()

    def _write_lines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if self._status is not None:
                self._log.write(line + b"\n")
            self._screen.write(self._prefix + line)


class ProgressFiles:
    """The progress files of the ranks, in the launcher's directory in memory.

    Other programs may delete files in memory: a missing file counts as empty, and is created again for the next attempt.
    """

    def __init__(self, memory: pathlib.Path):
        self._folder = memory / "notes"

    def create(self, rank: int) -> pathlib.Path:
        """Creates the file of a rank that is about to start, and returns its path.

        Raises:
          InputError: there is no memory for the file.
        """
        path = self._path(rank)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            progress_file.create(path)
        except OSError as error:
            raise InputError(
                f"The ranks' progress files must fit in memory. Received: {path} ({error.strerror}). Free up space there."
            ) from error
        return path

    def read(self, ranks: Iterable[int]) -> tuple[int | None, bool]:
        """Returns the last step that one of the ranks has recorded, or None, and whether one forbids a restart."""
        # logind may have removed files
        records = [progress_file.read(path) for path in map(self._path, ranks) if path.exists()]
        steps = [step for step, _ in records if step is not None]
        return max(steps, default=None), any(is_final for _, is_final in records)

    def _path(self, rank: int) -> pathlib.Path:
        return self._folder / f"rank-{rank}"
