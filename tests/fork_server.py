"""Fork servers for the Python programs that tests start, which save the seconds for imports.

Variables that libraries read when they are imported must be the same in a server and its forks: there is one server for each
such environment (`_READ_BY_IMPORTS`). `tests.processes` starts programs through them.
"""

import atexit
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tfdist.launcher.fork_server import TRAINING_IMPORTS, ForkedProcess, ForkServer

_READ_BY_IMPORTS = re.compile(r"KERAS|PYTHON|LD_|XLA_|OMP_|OPENBLAS_|MKL_|MPL|TFDS|HOME$|PATH$|TF_(?!CONFIG|NUM_|CPP_)")
_IMPORTED = (
    "matplotlib.pyplot",
    "rich.progress",
    "sklearn.datasets",
    TRAINING_IMPORTS,
    "tfdist.testing",
)
_ROOT = pathlib.Path(__file__).parent.parent


class Forked:
    """A forked process, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(self, process: ForkedProcess):
        """Args: process: the process."""
        self._process = process
        self.pid = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, -s if killed by signal s; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._process.poll()
            if self.returncode is not None:
                self._process.reap(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
          subprocess.TimeoutExpired: the process is still running.
        """
        if self.returncode is None and not self._process.has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Servers:
    """The servers of this process, by the values of the variables that imports read."""

    def __init__(self) -> None:
        """Initializes without servers."""
        self._servers: dict[str, ForkServer] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, directory: str = ""
    ) -> Forked:
        """Starts a Python program in a new session; see `ForkServer.start`.

        Args:
          command: as for `subprocess.Popen`.
          environment: all environment variables of the new process.
          output: file for standard output and standard error.
          directory: working directory; empty for that of this process.
        """
        with self._lock:
            server = self._server(environment)
            return Forked(server.start(command, environment, output.fileno(), output.fileno(), directory))

    def close(self) -> None:
        """Stops all servers."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def _server(self, environment: Mapping[str, str]) -> ForkServer:
        key = json.dumps([item for item in sorted(environment.items()) if _READ_BY_IMPORTS.match(item[0])])
        if key not in self._servers:
            variables = {name: value for name, value in environment.items() if name != "TF_CONFIG"}
            variables["TF_CPP_MIN_LOG_LEVEL"] = "3"
            self._servers[key] = ForkServer(_IMPORTED, variables, str(_ROOT))
        return self._servers[key]
