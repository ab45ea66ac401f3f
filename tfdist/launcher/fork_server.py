"""Processes forked from one that has done their imports; see `fork_program` for the other side."""

import array
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO

from tfdist.launcher import fork_program
from tfdist.launcher.signals import ENDING

TRAINING_IMPORTS = (
    "tfdist.cli.training_imports"  # what tfdist's commands import; a name, as no launcher imports TensorFlow
)
_REPLY_SECONDS = 10.0  # for the id of a forked process
_IMPORT_SECONDS = 120.0  # on a loaded machine
_POLL_SECONDS = 0.1


class ForkedProcess:
    """A process forked by a `ForkServer`.

    Attributes:
      pid: see `LocalProcess`.
    """

    def __init__(self, connection: socket.socket):
        """Takes ownership of the connection, on which the server sends the process id and, at the end, the exit code.

        Raises:
          OSError: the server does not answer.
        """
        self._connection, self._received = connection, b""
        self._code: int | None = None
        pid = self._number(_REPLY_SECONDS)
        if pid is None:
            raise OSError("the fork server does not answer")
        self.pid = pid

    def poll(self) -> int | None:
        """See `LocalProcess`; -9 if the server itself was killed, with which the exit code is lost."""
        return self._wait(0.0)

    def has_ended(self, seconds: float | None) -> bool:
        """Waits at most this long for the end; None for no limit."""
        return self._wait(seconds) is not None

    def reap(self, seconds: float) -> bool:
        """See `LocalProcess`."""
        has_ended = self.has_ended(seconds)
        self._connection.close()
        return has_ended

    def _wait(self, seconds: float | None) -> int | None:
        if self._code is None:
            try:
                self._code = self._number(seconds)
            except ConnectionError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._code = -signal.SIGKILL
        return self._code

    def _number(self, seconds: float | None) -> int | None:
        """Returns the next number that the server sends, or None if none arrives in time."""
        self._connection.settimeout(seconds)
        with contextlib.suppress(BlockingIOError, TimeoutError):
            while b"\n" not in self._received:
                data = self._connection.recv(64)
                if not data:
                    raise ConnectionError("the fork server has ended")
                self._received += data
            line, _, self._received = self._received.partition(b"\n")
            return int(line)
        return None


class ForkServer:
    """Starts Python programs by forking a process that has imported modules; see `fork_program`.

    The process starts at once; the first `start` waits for its imports, unless `wait_until_ready` has done so.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], directory: str | None = None):
        """Starts the process.

        Args:
          modules: names of the modules to import, which must not start threads.
          environment: what they read from it must be the same for all programs.
          directory: working directory of the imports; by default that of this process.
        """
        self._control, theirs = socket.socketpair()
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", fork_program.__name__, *modules],
                env=dict(environment),
                cwd=directory,
                stdin=theirs.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._is_ready = False
        self.pid = self._process.pid

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], out: int, err: int, directory: str = ""
    ) -> ForkedProcess:
        """Starts `python PROGRAM ...`, `python -m MODULE ...` or `python -c CODE ...`, without waiting for it.

        Args:
          command: see `can_fork`.
          environment: all environment variables of the new process.
          out: file descriptor for its standard output.
          err: file descriptor for its standard error.
          directory: its working directory; empty for that of this process.

        Raises:
          OSError: the server has ended, with the reason that it printed, or does not answer.
        """
        self.wait_until_ready()
        request = {"arguments": [*command[1:]], "environment": dict(environment), "directory": directory or os.getcwd()}
        text = json.dumps(request).encode()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            files = array.array("i", [theirs.fileno(), out, err])
            self._control.settimeout(_REPLY_SECONDS)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
            self._control.sendmsg([len(text).to_bytes(4, "little")], rights)
            self._control.sendall(text)
            theirs.close()
            process = ForkedProcess(ours)
            on_failure.pop_all()
        return process

    def wait_until_ready(self, interrupted: Callable[[], object] = lambda: False) -> None:
        """Waits until the imports have ended.

        Args:
          interrupted: polled; whether to stop waiting.

        Raises:
          OSError: they have failed, with the last line that they printed, took too long, or were interrupted.
        """
        end = time.monotonic() + _IMPORT_SECONDS
        while not self._is_ready:
            self._control.settimeout(_POLL_SECONDS)
            try:
                self._is_ready = self._control.recv(len(fork_program.READY)) == fork_program.READY
            except TimeoutError as error:
                if interrupted() or time.monotonic() > end:
                    raise OSError(f"the imports have not ended after {_IMPORT_SECONDS:g} s, or the job ends") from error
                continue
            if not self._is_ready:
                raise OSError(self._last_line())

    def _last_line(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the server has ended with code {self._process.returncode}"

    def close(self) -> None:
        """Ends the server, but not the processes that it has started."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether a command is a program for this Python interpreter, without options for the interpreter.

    Args:
      command: a program and its arguments.
      environment: contains the PATH on which the program is found.
    """
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None or len(command) < 2 or (command[1][:1] == "-" and command[1] not in ("-m", "-c")):
        return False
    # Interpreters of virtual environments are links to the same file in different directories.
    same_directory = os.path.dirname(os.path.abspath(program)) == os.path.dirname(os.path.abspath(sys.executable))
    return (
        same_directory and os.path.samefile(program, sys.executable) and len(command) > 1 + (command[1] in ("-m", "-c"))
    )
