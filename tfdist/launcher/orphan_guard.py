"""Keeps a launcher from leaving orphans, even if it is killed by SIGKILL."""

import contextlib
import logging
import signal
import subprocess
import sys
from types import TracebackType
from typing import IO

from tfdist.launcher import reaper
from tfdist.launcher.signals import ENDING

_log = logging.getLogger("tfdist.launch")


class OrphanGuard:
    """A small process that outlives the launcher just long enough to end what it started.

    It is a fresh interpreter and no fork, so that a notebook with threads can have one, and in a session of its own, so
    that a terminal's signals pass it by. Processes that leave their group, as daemons do, are out of its reach. When
    somebody has ended it, the job goes on unguarded.
    """

    def __enter__(self) -> "OrphanGuard":
        # A blocked signal stays blocked in the new process, from its first instruction on: whoever ends everything of a
        # user's gives the launcher the time to say `done`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_missed = False
        return self

    def add(self, group: int) -> None:
        """Guards a process group."""
        self._tell(f"{group}\n")

    def add_directory(self, path: str) -> None:
        """Removes a directory if the launcher is killed; it may lie in memory."""
        self._tell(f"{path}\n")

    def forget(self, group: int) -> None:
        """Guards a process group no more: its number may become another's."""
        self._tell(f"-{group}\n")

    def look(self) -> None:
        """Warns, once, if somebody has ended the guard; to be called again and again while there is somebody to be guarded."""
        if not self._is_missed and self._process.poll() is not None:
            self._is_missed = True
            _log.warning(
                "tfdist.launch: somebody has ended process %d, the guard of this job's processes: they would outlive this "
                "launcher now, if SIGKILL ended it.",
                self._process.pid,
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._tell("done\n")
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._process.wait()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin
        return self._process.stdin

    def _tell(self, line: str) -> None:
        if self._input.closed:  # a thread of the launcher's may still talk at its end
            return
        with contextlib.suppress(BrokenPipeError):  # see `look`
            self._input.write(line.encode())
            self._input.flush()
