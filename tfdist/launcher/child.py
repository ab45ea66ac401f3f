"""Starts the process of a rank, sends signals to its process group, and determines its exit code."""

import contextlib
import logging
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfdist.errors import SIGNAL_OFFSET, ExitCode, InputError

_CGROUP_ROOT = pathlib.Path("/sys/fs/cgroup")
_MEMBERSHIP = pathlib.Path("/proc/self/cgroup")
REAP_SECONDS = 30.0  # time limit after the first SIGKILL; most processes end within milliseconds

_log = logging.getLogger("tfdist.launch")


def out_of_memory_kills() -> int:
    """Returns the number of processes that the kernel has killed in this process's control group for lack of memory.

    Child processes are in the same group unless they are moved; cgroup v2 includes nested groups. Returns 0 if the system
    does not count these events.
    """
    for counter in _counter_files():
        try:
            return int(re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)[1])  # type: ignore[index]
        except (OSError, TypeError):  # no file, or an older kernel
            continue
    return 0


def _counter_files() -> list[pathlib.Path]:
    """Returns files that may contain the counter; the path of the group may not be visible in a container."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    files = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if "memory" in controllers.split(","):
            root, name = _CGROUP_ROOT / "memory", "memory.oom_control"
        elif not controllers:
            root, name = _CGROUP_ROOT, "memory.events"
        else:
            continue
        files += [root / path.lstrip("/") / name, root / name]
    return files


class NewProcess:
    """A process of a new program, with file descriptors `out` and `err` for its output.

    Attributes:
      pid: id of the process and of its process group.

    Raises:
      OSError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], out: int, err: int):
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code, -s for signal s, or None if the process is running. Does not free the id."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not status:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def reap(self, seconds: float) -> bool:
        """Waits for the end, with a timeout, and frees the id; returns whether the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


EVALUATOR_RANK = -2  # stands for the rank of the evaluator


class Task(NamedTuple):
    """The command, environment and log of a rank, or of the evaluator."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: pathlib.Path


class Child:
    """The process of a rank, which leads a process group.

    It remains a zombie until `reap`, to keep its pid from being reused.

    Attributes:
      rank: rank of the process.
      log: file for its output.
      pid: id of the process and of its group.
      out: pipe from its standard output.
      err: pipe from its standard error.
      code: exit code, 6 if the kernel killed it for lack of memory, 128 + N for signal N; None while it runs.
      end_time: `time.monotonic()` when its end was detected.
      signaled: whether the launcher sent it a signal before its end.

    Raises:
      InputError: the program does not exist.
    """

    def __init__(self, task: Task):
        self.rank, self.log = task.rank, task.log
        self._name = "the evaluator" if self.rank == EVALUATOR_RANK else f"rank {self.rank}"
        (out, child_out), (err, child_err) = os.pipe(), os.pipe()
        self.out, self.err = os.fdopen(out, "rb"), os.fdopen(err, "rb")
        try:
            self._process = NewProcess(task.command, task.environment, child_out, child_err)
        except OSError as error:
            self.out.close()
            self.err.close()
            raise InputError(
                f'The command must be a program that can be started. Received: "{task.command[0]}" ({error.strerror}).'
            ) from error
        finally:
            os.close(child_out)
            os.close(child_err)
        self.pid = self._process.pid
        self.code: int | None = None
        self.end_time = 0.0
        self.signaled = False
        self._kill_time: float | None = None  # of the first SIGKILL
        self._initial_kills = out_of_memory_kills()

    def poll(self) -> bool:
        """Returns whether the process has ended."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.end_time = time.monotonic()
            self.code = code if code >= 0 else SIGNAL_OFFSET - code
            is_killed = self.code == SIGNAL_OFFSET + signal.SIGKILL and self._kill_time is None
            if is_killed and out_of_memory_kills() > self._initial_kills:
                self.code = ExitCode.OUT_OF_MEMORY
                _log.warning(
                    "tfdist launch: the kernel killed %s (process %d), because the memory of its control group or "
                    "of this host was used up. Lower --batch_size, start fewer processes here, or raise the limit.",
                    self._name,
                    self.pid,
                )
        return self.code is not None

    def signal(self, number: int) -> None:
        """Sends a signal to the process group."""
        if not self.poll():
            self.signaled = True
        if number == signal.SIGKILL and self._kill_time is None:
            self._kill_time = time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # some systems raise these errors for a zombie
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Kills the process group, and reaps the process.

        A process that does not end after SIGKILL, because it waits in the kernel for a device, is abandoned and counts as
        killed.
        """
        self.signal(signal.SIGKILL)
        assert self._kill_time is not None
        if not self._process.reap(max(0.0, self._kill_time + REAP_SECONDS - time.monotonic())):
            self.end_time, self.code = time.monotonic(), SIGNAL_OFFSET + signal.SIGKILL
            _log.warning(
                "tfdist launch: giving up on %s: its process, %d, has not ended %g s after SIGKILL. It is blocked "
                "in the kernel, for example by a file server that does not respond.",
                self._name,
                self.pid,
                REAP_SECONDS,
            )
