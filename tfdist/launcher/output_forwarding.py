"""Passes the ranks' output on: line by line with the rank as prefix to the launcher's output, and raw to the logs."""

import errno
import os
from typing import IO, BinaryIO, TextIO

from tfdist.launcher.line_splitter import LineSplitter
from tfdist.launcher.log_files import Log

_CHUNK = 1 << 16
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)


class Screen:
    """An output stream for complete lines.

    Output that cannot be stored, as in a file on a full disk, is lost.

    Attributes:
      gone: whether it has no reader any more, as with `| head` or a closed terminal.
    """

    def __init__(self, stream: TextIO):
        """Wraps `stream`: a console, a file, or a notebook's output, which has no underlying byte stream."""
        self._stream = stream
        self._bytes: BinaryIO | None = getattr(stream, "buffer", None)
        self.gone = False

    def write(self, line: bytes) -> None:
        """Writes one line."""
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

    def __init__(self, rank: int, pipe: IO[bytes], screen: Screen, log: Log):
        """Takes ownership of `pipe`, the read end. `log` receives the unmodified bytes."""
        self._prefix = f"[{rank}] ".encode()
        self._pipe, self._screen, self._log = pipe, screen, log
        self._lines = LineSplitter()
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
        self._log.write(data)
        for line in self._lines.feed(data):
            self._screen.write(self._prefix + line)
        return bool(data)

    def close(self) -> None:
        """Passes on an incomplete last line, and closes the pipe."""
        for line in self._lines.end():
            self._screen.write(self._prefix + line)
        self._pipe.close()
