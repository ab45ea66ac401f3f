"""What the ranks write: to the launcher's own output, line by line and each behind its rank, and raw to their logs."""

import errno
import os
from typing import IO, BinaryIO, TextIO

from tfdist.launcher.lines import Lines
from tfdist.launcher.logs import Log

_CHUNK = 1 << 16
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)


class Screen:
    """A stream that takes whole lines.

    Attributes:
      gone: whether nobody reads it any more, as behind `| head`, or on a terminal that is closed.

    What finds no room, as in a file on a full disk, is lost.
    """

    def __init__(self, stream: TextIO):
        """Args: stream: a console, a file, or a notebook's output, which has no bytes beneath it."""
        self._stream = stream
        self._bytes: BinaryIO | None = getattr(stream, "buffer", None)
        self.gone = False

    def write(self, line: bytes) -> None:
        """Writes one line, in one piece."""
        if self.gone:
            return
        try:
            if self._bytes:
                self._stream.flush()  # what was printed before comes before
                self._bytes.write(line + b"\n")
                self._bytes.flush()
            else:
                self._stream.write(line.decode(errors="replace") + "\n")
                self._stream.flush()
        except OSError as error:  # of a terminal that is closed EIO: whoever still has to save must not end of it
            self.gone = error.errno not in _NO_ROOM


class Channel:
    """One output of one rank: from its pipe to a screen and into its log."""

    def __init__(self, rank: int, pipe: IO[bytes], screen: Screen, log: Log):
        """Args: pipe: the end to read, which is taken over; log: gets it as it is."""
        self._prefix = f"[{rank}] ".encode()
        self._pipe, self._screen, self._log = pipe, screen, log
        self._lines = Lines()
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """For a selector."""
        return self._pipe.fileno()

    def pump(self) -> bool:
        """Passes on what has arrived; returns whether there may be more."""
        try:
            data = os.read(self.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        self._log.write(data)
        for line in self._lines.feed(data):
            self._screen.write(self._prefix + line)
        return bool(data)

    def close(self) -> None:
        """Passes on a last line without an end, and closes the pipe."""
        for line in self._lines.end():
            self._screen.write(self._prefix + line)
        self._pipe.close()
