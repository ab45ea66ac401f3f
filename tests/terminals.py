"""Programs on terminals, as started by a person."""

import fcntl
import os
import pathlib
import select
import struct
import subprocess
import termios
import time

from tests.waiting import DEADLINE


class Terminal:
    """A process on a new terminal; as a context, it kills the process at the end.

    A session leader that opens a terminal gets SIGHUP when it closes; one that only inherits it does not.
    """

    def __init__(
        self, command: list[str], directory: pathlib.Path, name: str, columns: int = 80, is_controlled: bool = True
    ):
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        opens = ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&1', os.ttyname(slave)] if is_controlled else []
        inherited = {key: v for key, v in os.environ.items() if key not in ("COLUMNS", "LINES", "FORCE_COLOR")}
        options = {"cwd": directory, "env": {**inherited, "TERM": name}, "start_new_session": True}
        self.process = subprocess.Popen([*opens, *command], stdout=slave, stderr=slave, **options)
        os.close(slave)
        self.screen = open(master, "r+b", buffering=0)
        self.said = b""

    def wait_for(self, text: bytes, count: int = 1, seconds: float = DEADLINE) -> None:
        end = time.monotonic() + seconds
        while self.said.count(text) < count and self._read(end - time.monotonic()):
            pass
        assert self.said.count(text) >= count, self.said.decode()

    def end(self, seconds: float = DEADLINE) -> int:
        """Reads until nobody has the terminal open any more; returns the exit code of the process."""
        end = time.monotonic() + seconds
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(timeout=DEADLINE)

    def _read(self, seconds: float) -> bool:
        """Reads what comes within some seconds; returns whether more may come."""
        try:
            if select.select([self.screen], [], [], max(seconds, 0.0))[0]:
                self.said += (written := self.screen.read(1 << 16))
                return bool(written)
        except OSError:  # nobody has the terminal open any more
            pass
        return False

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self.screen.close()
