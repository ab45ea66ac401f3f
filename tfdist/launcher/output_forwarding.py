"""Passes the ranks' output on: line by line with the rank as prefix to the launcher's output, and raw to the logs."""

import errno
import os
from collections.abc import Iterable
from typing import IO, BinaryIO, TextIO

from tfdist.launcher.line_splitter import LineSplitter
from tfdist.launcher.log_files import Log
from tfdist.process.status_line import StatusLine

_CHUNK = 1 << 16
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)


def prefix(rank: int) -> str:
    """Returns what the lines of a rank begin with."""
    return f"[{rank}] "


class Screen:
    """An output stream for complete lines.

    Output that cannot be stored, as in a file on a full disk, is lost.

    Attributes:
      gone: whether it has no reader any more, as with `| head` or a closed terminal.
    """

    def __init__(self, stream: TextIO, status: StatusLine | None = None):
        """Wraps a stream.

        Args:
          stream: a console, a file, or a notebook's output, which has no underlying byte stream.
          status: the last line of the terminal to which the stream writes, if it is one.
        """
        self._stream = stream
        self._bytes: BinaryIO | None = getattr(stream, "buffer", None)
        self._status = status
        self.gone = False

    def write(self, line: bytes) -> None:
        """Writes one line, above the status line."""
        if self._status:
            with self._status.hidden():
                self._write(line)
        else:
            self._write(line)

    def _write(self, line: bytes) -> None:
        if self.gone:
            return
        try:
            if self._bytes:
                self._stream.flush()  # keeps the order with earlier prints
                self._bytes.write(line + b"\n")
                self._bytes.flush()
            else:
                self._stream.write(line.decode(errors="replace") + "\n")
                self._stream.flush()
        # EIO for a closed terminal, which must not end the launcher while ranks are still saving.
        except OSError as error:
            self.gone = error.errno not in _NO_ROOM


class Channel:
    """One output of one rank: copies its pipe to a screen and a log."""

    def __init__(self, rank: int, pipe: IO[bytes], screen: Screen, log: Log, status: StatusLine | None = None):
        """Initializes the channel.

        Args:
          rank: rank of the process.
          pipe: read end, of which the channel takes ownership.
          screen: gets its lines.
          log: gets the unmodified bytes or, with `status`, what remains visible of them.
          status: gets its incomplete line, such as a progress bar.
        """
        self._prefix = prefix(rank).encode()
        self._pipe, self._screen, self._log, self._status = pipe, screen, log, status
        self._lines = LineSplitter(yields_states=status is None)
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Returns the file descriptor, for a selector."""
        return self._pipe.fileno()

    def pump(self) -> bool:
        """Passes on the data that has arrived; returns whether there may be more."""
        try:
            data = os.read(self.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if self._status is None:
            self._log.write(data)
            self._pass_on(self._lines.feed(data))
        else:
            for line in self._lines.feed(data):
                self._status.set(b"")
                self._pass_on([line.rstrip()])  # without the spaces that covered the bar
            self._status.set(self._lines.current)
        return bool(data)

    def close(self) -> None:
        """Passes on an incomplete last line, and closes the pipe."""
        if self._status is not None:
            self._status.set(b"")
        self._pass_on(self._lines.end())
        self._pipe.close()

    def _pass_on(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if self._status is not None:
                self._log.write(line + b"\n")
            self._screen.write(self._prefix + line)
