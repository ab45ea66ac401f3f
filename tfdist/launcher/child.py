"""One process of a job, in a session of its own."""

import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from tfdist.errors import InputError
from tfdist.errors.exit_codes import SIGNALLED

REAP_SECONDS = 30.0  # from the first SIGKILL on; the system ends most within a few milliseconds

_log = logging.getLogger("tfdist.launch")


class Task(NamedTuple):
    """What a rank runs: its command, its environment and its log."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: pathlib.Path


class Child:
    """A rank's process, which leads a process group. It stays a zombie until `reap`, so that its number stays its own.

    Attributes:
      rank: the process's rank.
      log: where its output is written.
      pid: of the process, and of its group.
      out: what it writes to standard output.
      err: what it writes to standard error.
      code: its exit code, 128 + the signal's number if one ended it; None while it runs.
      ended: when that was seen, as `time.monotonic()` says it.
      signalled: whether the launcher had sent it a signal before.
    """

    out: IO[bytes]
    err: IO[bytes]

    def __init__(self, task: Task):
        """Starts the process.

        Raises:
          InputError: there is no such program.
        """
        self.rank, self.log = task.rank, task.log
        try:
            process = subprocess.Popen(
                list(task.command),
                env=dict(task.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(
                f'The command must be a program that can be started. Received: "{task.command[0]}" ({error.strerror}).'
            ) from error
        assert process.stdout and process.stderr
        self._process = process
        self.pid = process.pid
        self.out, self.err = process.stdout, process.stderr
        self.code: int | None = None
        self.ended = 0.0
        self.signalled = False
        self._killed: float | None = None  # when

    def poll(self) -> bool:
        """Returns whether the process has ended."""
        if self.code is None:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found:
                self.ended = time.monotonic()
                exited = found.si_code == os.CLD_EXITED
                self.code = found.si_status if exited else SIGNALLED + found.si_status
        return self.code is not None

    def signal(self, number: int) -> None:
        """Sends a signal to the process and all others of its group."""
        if not self.poll():
            self.signalled = True
        if number == signal.SIGKILL and self._killed is None:
            self._killed = time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what some systems say of a zombie
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Ends whatever is left of the group, and gives the process's number back.

        One that even SIGKILL does not end, as it waits in the system for a disk or a device, is left, and counts as killed.
        """
        self.signal(signal.SIGKILL)
        assert self._killed is not None
        try:
            self._process.wait(max(0.0, self._killed + REAP_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.ended, self.code = time.monotonic(), SIGNALLED + signal.SIGKILL
            _log.warning(
                "tfdist.launch: rank %d is left: its process, %d, has not ended %g s after SIGKILL. It waits for the system, "
                "as for a file server that does not answer.",
                self.rank,
                self.pid,
                REAP_SECONDS,
            )
