"""`tfdist launch`, with the imports of its fork server done: the launcher is a fork of a test's fork server.

    python tests/forked_launcher.py FLAGS -- COMMAND ...

Before the launcher runs, this process forks itself. The fork waits until the launcher would start a process that imports
TensorFlow, and takes its place: it runs the same program, `tfdist.launcher.fork_program`, whose imports are done. Everything
else is the launcher's own.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launcher import fork_program, fork_server
from tfdist.launcher.signals import ENDING


class Preloaded:
    """The fork of this process, with the part of the interface of `subprocess.Popen` that `ForkServer` uses."""

    def __init__(self) -> None:
        """Forks."""
        self._control, theirs = socket.socketpair()
        self.returncode: int | None = None
        self.is_used = False
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            _become_fork_program(theirs)
        theirs.close()

    def begin(
        self, modules: Sequence[str], environment: Mapping[str, str], directory: str, files: Sequence[int]
    ) -> None:
        """Makes it `fork_program` for these modules, with these files as standard input, output and error."""
        self.is_used = True
        request = json.dumps([modules, dict(environment), directory]).encode()
        socket.send_fds(self._control, [len(request).to_bytes(4, "little")], list(files))
        self._control.sendall(request)
        self._control.close()

    def kill(self) -> None:
        """Sends SIGKILL."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _become_fork_program(control: socket.socket) -> None:
    """Waits for a request, runs `fork_program` as it says, and ends; also if the launcher ends without a request."""
    code = 1
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        head, files, _, _ = socket.recv_fds(control, 4, 3)
        if head:
            with control.makefile("rb") as text:
                modules, environment, directory = json.loads(text.read(int.from_bytes(head, "little")))
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            control.close()
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            code = fork_program.main(modules)
    finally:
        os._exit(code)


def main() -> None:
    """Runs the launcher."""
    preloaded = Preloaded()

    def popen(command: Sequence[str], **options: Any) -> Any:
        if preloaded.is_used:  # a second fork server
            return subprocess.Popen(command, **options)
        files = [options["stdin"], options["stdout"].fileno(), options["stderr"].fileno()]
        modules = command[command.index(fork_program.__name__) + 1 :]
        preloaded.begin(modules, options["env"], options["cwd"] or os.getcwd(), files)
        return preloaded

    fork_server.subprocess = types.SimpleNamespace(Popen=popen)  # type: ignore[attr-defined]
    sys.path[0] = os.getcwd()
    sys.orig_argv[1:] = ["-m", "tfdist.launch", *sys.argv[1:]]
    runpy.run_module("tfdist.launch", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
