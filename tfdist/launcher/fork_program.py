"""A process that imports modules once, and forks itself for each Python program that it is asked to run.

    python -m tfdist.launcher.fork_program MODULE ...

Standard input is a socket to the process that asks, `ForkServer`. A fork is like a new process, without the seconds for the
imports: it has its own environment, directory, arguments, session and outputs. TensorFlow has no threads and no devices before
the fork. This process ends at the end of its input; signals that end a job are blocked, so that exit codes are not lost.
"""

import array
import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.process import exit_status
from tfdist.process.uncaught_errors import call_excepthook, end_with_exit_codes

READY = b"ready\n"
_FILES = 3  # sent with each request: the connection for the process id and exit code, standard output, standard error


def serve(control: socket.socket) -> None:
    """Forks for each request until the end of the input.

    A process that has ended remains a zombie until its connection is closed, so that its id is not reused.
    """
    children: dict[int, socket.socket] = {}  # by process id
    running: set[int] = set()
    with selectors.DefaultSelector() as selector:
        ended, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        selector.register(ended, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        control.sendall(READY)
        while True:
            for key, _ in selector.select():
                if key.fileobj is ended:
                    ended.recv(4096)
                elif key.fileobj is control:
                    request = _request(control)
                    if request is None:
                        return
                    pid = _fork(*request)
                    children[pid] = connection = request[1]
                    running.add(pid)
                    selector.register(connection, selectors.EVENT_READ, pid)
                else:  # closed
                    selector.unregister(key.fileobj)
                    running.discard(key.data)
                    _reap(key.data, children.pop(key.data))
            running -= {pid for pid in running if _tells_end(pid, children[pid])}


def _request(control: socket.socket) -> tuple[Mapping[str, Any], socket.socket, Sequence[int]] | None:
    """Receives what to run, the connection to the one who asked, and the outputs; None at the end of the input."""
    files = array.array("i")
    head, ancillary, _, _ = control.recvmsg(4, socket.CMSG_LEN(_FILES * files.itemsize))
    if not head:
        return None
    for _, _, data in ancillary:
        files.frombytes(data)
    text = control.makefile("rb", buffering=0)
    size, received = int.from_bytes(head, "little"), b""
    while len(received) < size:
        received += text.read(size - len(received)) or b""
    connection, *outputs = files
    return json.loads(received), socket.socket(fileno=connection), outputs


def _fork(request: Mapping[str, Any], connection: socket.socket, outputs: Sequence[int]) -> int:
    """Forks; tells the process id when the process leads its session, by which it is signalled."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _exec(request, outputs, writer)
    for file in (writer, *outputs):
        os.close(file)
    os.read(reader, 1)  # until the process has closed its end
    os.close(reader)
    _send(connection, pid)
    return pid


def _tells_end(pid: int, connection: socket.socket) -> bool:
    """Returns whether a process has ended; if so, sends its exit code."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found:
        _send(connection, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
    return found is not None


def _reap(pid: int, connection: socket.socket) -> None:
    connection.close()
    os.waitpid(pid, os.WNOHANG)  # not if it is blocked in the kernel: it stays a child, and is not waited for


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the one who asked does not wait any more
        connection.sendall(b"%d\n" % number)


def _name(arguments: Sequence[str]) -> None:
    """Names this process after its program; its command line remains that of the server."""
    program = arguments[1] if arguments[0] == "-m" else os.path.basename(arguments[0])
    name = "python" if program == "-c" else program
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def _exec(request: Mapping[str, Any], outputs: Sequence[int], leads: int) -> None:
    """Runs the requested program in this process, and ends with its exit code; closes `leads` when it leads a session."""
    code: Any = 1
    try:
        os.setsid()
        os.close(leads)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
        os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), 4096))
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
        errors = io.FileIO(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(errors, encoding="utf-8", errors="backslashreplace", write_through=True)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        _name(request["arguments"])
        _forget_random_states()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        end_with_exit_codes()
        code = _ended(request["arguments"])
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _forget_random_states() -> None:
    """Seeds generators anew that were seeded by the imports: processes of the same server must not draw the same numbers."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _ended(arguments: Sequence[str]) -> int:
    """Runs a program and Python's exit handling; returns its exit code."""
    code: Any = None
    error: BaseException | None = None
    try:
        _run(*arguments)
    except SystemExit as end:
        code = end.code
        exit_status.ends_by(end)
    except BaseException as raised:
        error = raised
    if error is not None:  # not while it is handled: it is no context of another error in the hook
        code = _uncaught(error)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all non-daemon threads
    atexit._run_exitfuncs()
    _flush_files()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code or 0


def _flush_files() -> None:
    """Writes what the program has not flushed, which Python does when it deletes the open files at its end."""
    for each in gc.get_objects():
        if isinstance(each, io.TextIOBase | io.BufferedIOBase):
            with contextlib.suppress(Exception):
                each.flush()


def _uncaught(error: BaseException) -> Any:
    """Prints what the program would print in a process of its own; returns its exit code."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        call_excepthook(error.with_traceback(trace))
    except SystemExit as end:
        return end.code
    return 1


def _run(program: str, *arguments: str) -> None:
    sys.orig_argv[1:] = [program, *arguments]  # instead of the command line of this server
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


def main(modules: Sequence[str]) -> int:
    """Imports modules, then serves; returns the exit code."""
    control = socket.socket(fileno=os.dup(0))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # as in the commands of tfdist
    for module in modules:
        importlib.import_module(module)
    if threading.active_count() > 1:
        print(f"the imported modules have started threads: {threading.enumerate()[1:]}", file=sys.stderr)
        return 1
    serve(control)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
