"""Fork servers for the Python programs that tests start, which save the seconds for imports.

    python -u -m tests.fork_server MODULE ...

A server imports modules, and forks itself for each request that arrives at the socket which is its standard input. The program
is the last thing that a fork runs, so that Python ends as in a process of its own. A launcher has a server for its ranks, which
is a fork of it.

Variables that libraries read when they are imported must be the same in a server and its forks: there is one server for each
such environment (`_READ_BY_IMPORTS`). `tests.processes` starts programs through them.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pathlib
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import numpy as np

from tfdist.cluster import exit_status
from tfdist.launcher import child
from tfdist.launcher.child import NewProcess

_READ_BY_IMPORTS = re.compile(r"KERAS|PYTHON|LD_|XLA_|OMP_|OPENBLAS_|MKL_|MPL|TFDS|HOME$|PATH$|TF_(?!CONFIG|NUM_|CPP_)")
_IMPORTED = (
    "matplotlib.pyplot",
    "rich.progress",
    "sklearn.datasets",
    "tensorflow",
    "tfdist.cli.run",
    "tfdist.distribution.tf_distribute",
    "tfdist.keras_fit",
    "tfdist.reporting.tensorboard",
    "tfdist.testing",
)
_LAUNCHER = ["-m", "tfdist.launch"]
_ROOT = pathlib.Path(__file__).parent.parent


class Forked:
    """A forked process: what a launcher uses of `NewProcess`, and what tests use of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket):
        """Args: connection: where the process writes its id, and its parent the exit code."""
        self._lines = connection.makefile("rb")
        self._connection = connection
        self.returncode: int | None = None
        self.pid = self._number()

    def poll(self) -> int | None:
        """Returns the exit code, -s if killed by signal s; None while the process runs."""
        self.reap(0.0)
        return self.returncode

    def reap(self, seconds: float | None) -> bool:
        """Waits at most this long for the end, None for no limit; returns whether the process has ended."""
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = self._number()
            self._lines.close()
            self._connection.close()
        return self.returncode is not None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
          subprocess.TimeoutExpired: the process is still running.
        """
        if not self.reap(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

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

    def _number(self) -> int:
        line = self._lines.readline()
        assert line, "the fork server has ended"
        return int(line)


class Servers:
    """The servers of this process, by the values of the variables that imports read."""

    def __init__(self) -> None:
        """Initializes without servers."""
        self._servers: dict[str, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends all servers."""
        for server, process in self._servers.values():
            server.close()
            process.kill()
            process.wait()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, directory: str = ""
    ) -> Forked:
        """Starts a Python program in a new session.

        Args:
          command: as for `subprocess.Popen`, see `can_fork`.
          environment: all environment variables of the new process.
          output: file for standard output and standard error.
          directory: working directory; empty for that of this process.
        """
        with self._lock:
            return _ask(self._server(environment), command, environment, [output.fileno()] * 2, directory)

    def _server(self, environment: Mapping[str, str]) -> socket.socket:
        key = json.dumps([item for item in sorted(environment.items()) if _READ_BY_IMPORTS.match(item[0])])
        if key not in self._servers:
            variables = {name: value for name, value in environment.items() if name != "TF_CONFIG"}
            variables["TF_CPP_MIN_LOG_LEVEL"] = "3"
            ours, theirs = _connection()
            command = [sys.executable, "-u", "-m", "tests.fork_server", *_IMPORTED]
            process = subprocess.Popen(command, env=variables, cwd=_ROOT, stdin=theirs, start_new_session=True)
            theirs.close()
            self._servers[key] = ours, process
        return self._servers[key][0]


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether a command is a program for this Python interpreter, without options for the interpreter."""
    is_own = shutil.which(command[0], path=environment.get("PATH")) == sys.executable
    return is_own and len(command) > 1 and (command[1][:1] != "-" or command[1] in ("-m", "-c"))


def _connection() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a message is a request


def _ask(
    server: socket.socket,
    command: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[int],
    directory: str,
) -> Forked:
    request = json.dumps([command[1:], dict(environment), directory or os.getcwd()])
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(server, [request.encode()], [theirs.fileno(), *outputs])
    return Forked(ours)


def _serve(control: socket.socket) -> list[str]:
    """Forks for each request until the end of the input; returns in each fork, with the arguments of its program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # parents of programs, which tell the exit codes, are not waited for
    while True:
        request, files, _, _ = socket.recv_fds(control, 2**20, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    connection = socket.socket(fileno=files[0])
    if pid == 0:
        os.setsid()
        connection.sendall(b"%d\n" % os.getpid())
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files[1:]]):
        os.dup2(file, number)  # by the parent as well, which must not keep what was there open
        os.close(file)
    if pid:
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the one who asked does not wait any more
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    connection.close()
    return _become(*json.loads(request))


def _become(arguments: list[str], environment: Mapping[str, str], directory: str) -> list[str]:
    """Gives this process what a program sees of its start; returns its arguments."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.orig_argv[1:] = arguments
    name = arguments[1] if arguments[0] == "-m" else "python"
    pathlib.Path("/proc/self/comm").write_text(name)  # the command line remains that of the server
    np.random.seed()  # processes of the same server must not draw the same numbers
    exit_status.install_exit_code_hook()
    return arguments


def _run(program: str, *arguments: str) -> None:
    if program == "-m":
        sys.argv, sys.path[0] = [*arguments], os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = [program, *arguments], os.path.dirname(os.path.realpath(program))
        runpy.run_path(program, run_name="__main__")


def _fork_ranks(launcher: list[str]) -> list[str]:
    """Makes a launcher in this process fork those ranks that run commands of tfdist; returns in each, with its arguments."""
    ours, theirs = _connection()
    if os.fork() == 0:
        ours.close()
        os.setsid()
        return _serve(theirs)
    theirs.close()

    def start(command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> "Forked | NewProcess":
        is_command = command[1:2] == ["-m"] and command[2].startswith("tfdist.")
        if is_command and can_fork(command, environment):
            return _ask(ours, command, environment, [out, err], "")
        return NewProcess(command, environment, out, err)

    child.NewProcess = start  # type: ignore[assignment, misc]
    return launcher


def main(modules: Sequence[str]) -> None:
    """Imports modules, then serves; runs a program in each fork."""
    control = socket.socket(fileno=os.dup(0))
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # so that the end of a fork does not copy all that was imported
    arguments = _serve(control)
    if arguments[:2] == _LAUNCHER:
        arguments = _fork_ranks(arguments)
    _run(*arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
