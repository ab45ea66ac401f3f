"""A memory limit for the processes of a job, which are ended together when they exceed it.

TensorFlow reserves several times the address space that it uses, so that a resource limit of the kernel, which counts what
is reserved, would end a process that needs little. What is resident is read from time to time instead.
"""

import contextlib
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence

import psutil

from tfdist.errors import ExitCode
from tfdist.errors.byte_sizes import byte_size
from tfdist.launcher.child import Start
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.local_process import LocalProcess
from tfdist.launcher.supervision import Stop

_SHARE = 0.9  # of the available memory; between two measurements, processes may use more
_SECONDS_BETWEEN_CHILDREN = 0.5
_COUNTED = ("RssAnon:", "RssShmem:")  # what can only be freed by ending the process; files can be read again
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_OF_GROUP = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_KILLED_FIRST = "1000"  # of the kernel's scores, if the host runs out of memory


def available_bytes() -> int:
    """Returns 90% of the memory that new processes can use: that of the host, or less in a container with a limit."""
    free = [psutil.virtual_memory().available]
    for limit, usage in _OF_GROUP:
        with contextlib.suppress(OSError, ValueError):  # without a limit, "max"
            free.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / usage).read_text()))
    return int(max(min(free), 1) * _SHARE)


def resident_bytes(pids: Iterable[int]) -> int:
    """Returns the memory that processes have together, without pages of files; those that have ended count nothing."""
    return sum(map(_resident, pids))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()]
        counted = [int(line[1]) * 1024 for line in lines if line and line[0] in _COUNTED]
        if counted:
            return sum(counted)
    with contextlib.suppress(psutil.Error):  # another system, or another kernel
        return int(psutil.Process(pid).memory_info().rss)
    return 0


class MemoryLimit:
    """Ends the processes of a job when they have more memory than a limit: one of the job's `stops`.

    Attributes:
      peak: the most memory that the processes were seen to have, in bytes.
      exceeded: whether they had more than the limit.
      text: the limit, for display.
    """

    def __init__(self, limit: int):
        """Initializes the limit, in bytes."""
        self.peak = 0
        self.exceeded = False
        self.text = byte_size(limit)
        self._limit = limit
        self._own: list[int] = []
        self._all: list[int] = []
        self._looked = 0.0

    def starting(self, start: Start) -> Start:
        """Returns `start`, such that the processes that it starts, and theirs, are counted."""

        def started(command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> LocalProcess:
            process = start(command, environment, out, err)
            self._own.append(process.pid)
            with contextlib.suppress(OSError):
                pathlib.Path(f"/proc/{process.pid}/oom_score_adj").write_text(_KILLED_FIRST)
            return process

        return started

    def __call__(self) -> Stop | None:
        """Looks at the processes; returns why they must end, if they must."""
        now = time.monotonic()
        if now - self._looked > _SECONDS_BETWEEN_CHILDREN or len(self._all) < len(self._own):
            self._looked, self._all = now, [pid for own in self._own for pid in _family(own)]
        used = resident_bytes(self._all)
        self.peak = max(self.peak, used)
        self.exceeded = self.exceeded or used > self._limit
        if not self.exceeded:
            return None
        return Stop(Outcome(ExitCode.OUT_OF_MEMORY, f"more than {self.text}"), seconds=0.0)


def _family(pid: int) -> list[int]:
    pids = [pid]
    with contextlib.suppress(psutil.Error):
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return pids
