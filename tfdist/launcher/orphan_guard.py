"""Ensures that a launcher leaves no orphaned processes, even if SIGKILL ends it."""

import contextlib
import math
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tfdist.cluster.signals import LAUNCHER_VARIABLE, TOGETHER_SECONDS
from tfdist.launcher import reaper

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def collect_signals(signals: list[int]) -> Iterator[None]:
    """Context manager that appends received `END_SIGNALS` to a list, instead of calling their handlers.

    Signals within a second of the first one count as part of it: a closing terminal sends two, and systemd sends SIGHUP
    after SIGTERM. If SIGHUP is already ignored, as under nohup, it stays ignored.

    SIGUSR1, which requests a report from a training process, is ignored here, and in new processes until they install their
    handlers: it must not kill a process that is starting.
    """
    first_time = math.inf

    def record(number: int, frame: object) -> None:
        nonlocal first_time
        first_time = min(first_time, time.monotonic())
        if not signals or time.monotonic() - first_time >= TOGETHER_SECONDS:
            signals.append(number)

    # Under nohup, a launcher outlives its terminal.
    ignored_signals = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    handlers = {number: signal.signal(number, record) for number in END_SIGNALS if number not in ignored_signals}
    handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class OrphanGuard:
    """A small process that kills the launcher's processes after the launcher has been killed.

    It is a new interpreter instead of a fork, because notebooks have threads. It has its own session, and does not receive a
    terminal's signals. On Linux, it also finds processes that have left their process group, as daemons do, by a variable in
    their environment. If the guard itself is killed, the job continues without it.

    Attributes:
      variables: environment variables that identify the processes to kill.
    """

    def __init__(self) -> None:
        token = secrets.token_hex(16)  # not secret
        self.variables, self._variable = {LAUNCHER_VARIABLE: token}, f"{LAUNCHER_VARIABLE}={token}"
        self._groups: set[int] = set()

    def __enter__(self) -> "OrphanGuard":
        # Signals stay blocked in the new process. If a signal is sent to all processes of a user, the launcher thus has time to
        # write `done`.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, self._variable],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        assert self._process.stdin
        self._input = self._process.stdin
        return self

    def add(self, group: int) -> None:
        """Adds a process group to kill."""
        self._groups.add(group)
        self._send(f"{group}\n")

    def add_directory(self, path: str) -> None:
        """Adds a directory to remove if the launcher is killed."""
        self._send(f"{path}\n")

    def forget(self, group: int) -> None:
        """Removes a process group that has ended; its id may be reused."""
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def sweep(self) -> None:
        """Kills processes of the job that have left their process group, except for added groups."""
        reaper.kill_by_variable(self._variable, self._groups)

    def __exit__(self, *_: object) -> None:
        self._send("done\n")
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        if self._input.closed:  # during shutdown, by another thread
            return
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._input.write(line.encode())
            self._input.flush()
