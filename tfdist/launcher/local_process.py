"""The processes of ranks, each the leader of its own session."""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol


class LocalProcess(Protocol):
    """A process on this host."""

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""

    def poll(self) -> int | None:
        """Returns the exit code, -s if signal s ended it, or None while it runs. The id stays reserved."""

    def reap(self, seconds: float) -> bool:
        """Waits at most this long for the end, and frees the id; returns whether the process has ended."""


class NewProcess:
    """A process with a new program.

    Attributes:
      pid: see `LocalProcess`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], out: int, err: int):
        """Starts the process, with the file descriptors of its outputs.

        Raises:
          OSError: the program cannot be started.
        """
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
        """See `LocalProcess`."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if not found:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def reap(self, seconds: float) -> bool:
        """See `LocalProcess`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None
