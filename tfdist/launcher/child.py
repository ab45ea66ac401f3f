"""The process of one rank: its start, signals to its process group, and how it ended."""

import contextlib
import logging
import os
import pathlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfdist.errors import ExitCode, InputError
from tfdist.errors.exit_codes import SIGNALLED
from tfdist.launcher.local_process import LocalProcess, NewProcess
from tfdist.launcher.memory_cgroup import out_of_memory_kills

REAP_SECONDS = 30.0  # after the first SIGKILL; most processes end within a few milliseconds

_log = logging.getLogger("tfdist.launch")


class Task(NamedTuple):
    """What a rank runs: its command, environment and log."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: pathlib.Path


Start = Callable[[Sequence[str], Mapping[str, str], int, int], LocalProcess]  # (command, environment, stdout, stderr)


class Child:
    """The process of a rank, which leads a process group.

    It remains a zombie until `reap`, so that its pid is not reused.

    Attributes:
      rank: rank of the process.
      log: file that its output is written to.
      pid: id of the process and of its group.
      out: pipe from its standard output.
      err: pipe from its standard error.
      code: its exit code, 6 if the kernel killed it for lack of memory, 128 + N if signal N ended it; None while it runs.
      ended: `time.monotonic()` when the end was noticed.
      signalled: whether the launcher had sent it a signal before.
    """

    def __init__(self, task: Task, start: Start = NewProcess):
        """Starts the process.

        Args:
          task: what it runs.
          start: starts a process, given file descriptors for its outputs.

        Raises:
          InputError: the program does not exist.
        """
        self.rank, self.log = task.rank, task.log
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        self.out, self.err = os.fdopen(out, "rb"), os.fdopen(err, "rb")
        try:
            self._process = start(task.command, task.environment, theirs_out, theirs_err)
        except OSError as error:
            self.out.close()
            self.err.close()
            raise InputError(
                f'The command must be a program that can be started. Received: "{task.command[0]}" ({error.strerror}).'
            ) from error
        finally:
            os.close(theirs_out)
            os.close(theirs_err)
        self.pid = self._process.pid
        self.code: int | None = None
        self.ended = 0.0
        self.signalled = False
        self._killed: float | None = None  # time of the first SIGKILL
        self._kills_before = out_of_memory_kills()

    def poll(self) -> bool:
        """Returns whether the process has ended."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.ended = time.monotonic()
            self.code = code if code >= 0 else SIGNALLED - code
            if self._is_out_of_memory():
                self.code = ExitCode.OUT_OF_MEMORY
                _log.warning(
                    "tfdist launch: the kernel killed rank %d (process %d), because the memory of its control group or "
                    "of this host was used up. Lower --batch_size, start fewer processes here, or raise the limit.",
                    self.rank,
                    self.pid,
                )
        return self.code is not None

    def _is_out_of_memory(self) -> bool:
        is_killed = self.code == SIGNALLED + signal.SIGKILL and self._killed is None
        return is_killed and out_of_memory_kills() > self._kills_before

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
        if not self._process.reap(max(0.0, self._killed + REAP_SECONDS - time.monotonic())):
            self.ended, self.code = time.monotonic(), SIGNALLED + signal.SIGKILL
            _log.warning(
                "tfdist launch: giving up on rank %d: its process, %d, has not ended %g s after SIGKILL. It is blocked "
                "in the kernel, for example by a file server that does not answer.",
                self.rank,
                self.pid,
                REAP_SECONDS,
            )
