"""A process of a job, in its own session."""

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

REAP_SECONDS = 30.0  # after the first SIGKILL; most processes end within a few milliseconds

_log = logging.getLogger("tfdist.launch")


class Task(NamedTuple):
    """What a rank runs: its command, environment and log."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: pathlib.Path


class Child:
    """The process of a rank, which leads a process group.

    It remains a zombie until `reap`, so that its pid is not reused.

    Attributes:
      rank: rank of the process.
      log: file that its output is written to.
      pid: id of the process and of its group.
      out: pipe from its standard output.
      err: pipe from its standard error.
      code: its exit code, 128 + N if signal N ended it; None while it runs.
      ended: `time.monotonic()` when the end was noticed.
      signalled: whether the launcher had sent it a signal before.
    """

    out: IO[bytes]
    err: IO[bytes]

    def __init__(self, task: Task):
        """Starts the process.

        Raises:
          InputError: the program does not exist.
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
        self._killed: float | None = None  # time of the first SIGKILL

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
        """Sends a signal to the process group."""
        if not self.poll():
            self.signalled = True
        if number == signal.SIGKILL and self._killed is None:
            self._killed = time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # some systems raise these for a zombie
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Kills whatever is left of the process group, and reaps the process.

        A process that survives SIGKILL because it waits in the kernel for a disk or device is abandoned, and counts as
        killed.
        """
        self.signal(signal.SIGKILL)
        assert self._killed is not None
        try:
            self._process.wait(max(0.0, self._killed + REAP_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.ended, self.code = time.monotonic(), SIGNALLED + signal.SIGKILL
            _log.warning(
                "tfdist.launch: giving up on rank %d: its process, %d, has not ended %g s after SIGKILL. It is blocked "
                "in the kernel, for example by a file server that does not answer.",
                self.rank,
                self.pid,
                REAP_SECONDS,
            )
