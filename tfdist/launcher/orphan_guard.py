"""Ensures that a launcher leaves no orphans, even if it is killed by SIGKILL."""

import contextlib
import logging
import math
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import IO

from tfdist.cluster.signals import LAUNCHER_VARIABLE, TOGETHER_SECONDS
from tfdist.launcher import reaper

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def received(numbers: tuple[signal.Signals, ...] = ENDING) -> Iterator[list[int]]:
    """Collects the signals that arrive in the body, in order, instead of their usual effect.

    Signals within a second of the first one are ignored as part of it: a closing terminal sends two, and systemd sends
    SIGHUP after SIGTERM. If SIGHUP was ignored before, as under nohup, it stays so.

    SIGUSR1, which asks a training process for a report, is ignored here and, until they install their handlers, in
    processes started in the body: it must not kill one that is just starting.

    Args:
      numbers: the signals to collect.
    """
    arrived: list[int] = []
    first = math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        first = min(first, time.monotonic())
        if not arrived or time.monotonic() - first >= TOGETHER_SECONDS:
            arrived.append(number)

    # Under nohup a launcher outlives its terminal.
    ignored = {number for number in numbers if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN}
    before = {number: signal.signal(number, note) for number in numbers if number not in ignored}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_log = logging.getLogger("tfdist.launch")


class OrphanGuard:
    """A small process that outlives the launcher just long enough to kill what it started.

    It is a new interpreter instead of a fork, so that it works in a notebook with threads, and has its own session,
    so that it does not receive a terminal's signals. On Linux it also finds processes that have left their process group,
    as daemons do, by a variable in their environment. If the guard itself is killed, the job continues without it.

    Attributes:
      variables: environment variables that all processes to be killed must have.
    """

    def __init__(self) -> None:
        """Chooses the variable."""
        self.variables = {LAUNCHER_VARIABLE: secrets.token_hex(16)}  # not secret
        self._groups: set[int] = set()

    def __enter__(self) -> "OrphanGuard":
        # A blocked signal stays blocked in the new process from its first instruction on. If a signal is sent to all
        # processes of a user, the launcher thus has time to write `done`.
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
        self._tell(f"{self._variable}\n")
        return self

    def add(self, group: int) -> None:
        """Adds a process group to be killed."""
        self._groups.add(group)
        self._tell(f"{group}\n")

    def add_directory(self, path: str) -> None:
        """Adds a directory to be removed if the launcher is killed, because it may use memory."""
        self._tell(f"{path}\n")

    def forget(self, group: int) -> None:
        """Removes a process group, whose id may be reused."""
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def sweep(self) -> None:
        """Kills processes of the job that have left the process groups in which they were started, except added ones."""
        reaper.kill_marked(self._variable, self._groups)

    def look(self) -> None:
        """Warns once if the guard was killed; to be polled while there are processes to guard."""
        if not self._is_missed and self._process.poll() is not None:
            self._is_missed = True
            _log.warning(
                "tfdist launch: process %d, the guard of this job's processes, was killed: if SIGKILL ends this "
                "launcher now, they outlive it.",
                self._process.pid,
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._tell("done\n")
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._process.wait()

    @property
    def _variable(self) -> str:
        [(name, value)] = self.variables.items()
        return f"{name}={value}"

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin
        return self._process.stdin

    def _tell(self, line: str) -> None:
        if self._input.closed:  # a thread of the launcher may call this during shutdown
            return
        with contextlib.suppress(BrokenPipeError):  # see `look`
            self._input.write(line.encode())
            self._input.flush()
