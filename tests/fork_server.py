"""A process that has imported TensorFlow, Keras and tfdist, and forks itself for each Python program that a test starts.

A fork is like a new process, without the seconds for imports: it gets its own environment, directory, arguments, session and
output, and TensorFlow has no threads because its devices have not been initialized. Variables that libraries read when they are
imported must be the same in both: there is one server for each such environment (`_READ_BY_IMPORTS`).

    python -m tests.fork_server SOCKET

`tests.processes` starts programs through it.
"""

import array
import atexit
import contextlib
import importlib
import io
import json
import os
import random
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

_READ_BY_IMPORTS = re.compile(r"KERAS|PYTHON|LD_|XLA_|OMP_|OPENBLAS_|MKL_|MPL|TFDS|HOME$|PATH$|TF_(?!CONFIG|NUM_|CPP_)")
_IMPORTED = (
    "matplotlib.pyplot",
    "rich.progress",
    "sklearn.datasets",
    "tensorflow",
    "keras",
    "tfdist.trainer.trainer",
    "tfdist.cli.opened_run",
    "tfdist.checkpoint.restore",
    "tfdist.distribution.tf_distribute",
    "tfdist.keras_fit",
    "tfdist.testing",
)
_SECONDS = 120.0  # for the imports, on a loaded machine


class Forked:
    """A forked process, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket):
        """Args: connection: connection to the server, which sends the process id and, at the end, the exit code."""
        self._connection, self._lines = connection, connection.makefile("r")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, -s if killed by signal s; None while the process runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
          subprocess.TimeoutExpired: the process is still running.
        """
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
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

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            with contextlib.suppress(BlockingIOError, TimeoutError):
                self._connection.recv(1, socket.MSG_PEEK)
                self._connection.settimeout(None)
                with self._connection, self._lines:
                    self.returncode = int(self._lines.readline())
        return self.returncode


class Servers:
    """The servers of this process, by the values of the variables that imports read."""

    def __init__(self) -> None:
        """Initializes without servers."""
        self._directory = tempfile.TemporaryDirectory(prefix="tfdist-fork-server-")
        self._servers: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, directory: str = ""
    ) -> Forked:
        """Starts `python PROGRAM ...`, `python -m MODULE ...` or `python -c CODE ...` in a new session.

        Args:
          command: as for `subprocess.Popen`; see `can_fork`.
          environment: all environment variables of the new process.
          output: file for standard output and standard error.
          directory: working directory; empty for that of this process.
        """
        connection = socket.socket(socket.AF_UNIX)
        with self._lock:
            connection.connect(self._address(environment))
        request = {"arguments": [*command[1:]], "environment": dict(environment), "directory": directory or os.getcwd()}
        text = json.dumps(request).encode()
        files = array.array("i", [output.fileno()])
        connection.sendmsg([len(text).to_bytes(4, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        connection.sendall(text)
        return Forked(connection)

    def close(self) -> None:
        """Stops all servers."""
        for _, server in self._servers.values():
            server.kill()
            server.communicate()
        self._servers.clear()
        self._directory.cleanup()

    def _address(self, environment: Mapping[str, str]) -> str:
        key = json.dumps([item for item in sorted(environment.items()) if _READ_BY_IMPORTS.match(item[0])])
        if key not in self._servers:
            path = os.path.join(self._directory.name, str(len(self._servers)))
            root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            variables = {**environment, "TF_CPP_MIN_LOG_LEVEL": "3"}
            variables.pop("TF_CONFIG", None)
            command = [sys.executable, "-m", "tests.fork_server", path]
            server = subprocess.Popen(command, cwd=root, env=variables, stdin=subprocess.PIPE)
            self._servers[key] = path, server
            _wait_for(path, server)
        return self._servers[key][0]


def can_fork(command: Sequence[str]) -> bool:
    """Returns whether a command is a Python program without interpreter options."""
    return command[0] == sys.executable and len(command) > 1 and (command[1] in ("-m", "-c") or command[1][0] != "-")


def _wait_for(path: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not os.path.exists(path):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The fork server did not start. Exit code: {server.poll()}.")
        time.sleep(0.02)


def serve(path: str) -> None:
    """Forks for each connection to a socket until standard input ends, which happens when the parent process ends."""
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as listener:
        ended, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        selector.register(ended, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is ended:
                    ended.recv(4096)
                else:
                    _fork(listener.accept()[0], children)
            _reap(children)


def _fork(connection: socket.socket, children: dict[int, socket.socket]) -> None:
    size, [(_, _, files)], _, _ = connection.recvmsg(4, socket.CMSG_LEN(4))
    request = json.loads(connection.makefile("rb").read(int.from_bytes(size, "little")))
    [output] = array.array("i", files)
    pid = os.fork()
    if pid == 0:
        _exec(request, output)
    os.close(output)
    children[pid] = connection
    connection.sendall(f"{pid}\n".encode())


def _reap(children: dict[int, socket.socket]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with children.pop(pid) as connection, contextlib.suppress(OSError):  # the test did not wait
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _exec(request: Mapping[str, Any], output: int) -> None:
    """Runs the requested program in this process, and ends with its exit code."""
    code: Any = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 4096 else 4096)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        random.seed()
        code = _ended(request["arguments"])
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _ended(arguments: Sequence[str]) -> int:
    """Runs a program and Python's exit handling; returns its exit code."""
    code: Any = None
    try:
        _run(*arguments)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all non-daemon threads
    atexit._run_exitfuncs()
    return code or 0


def _run(program: str, *arguments: str) -> None:
    if program == "-m":
        sys.argv, sys.path[0] = [*arguments], os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = [program, *arguments], os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    serve(sys.argv[1])
