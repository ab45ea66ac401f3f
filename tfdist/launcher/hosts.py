"""Which hosts may run processes of an elastic job, and how many each: a file, or a program that prints the same."""

import contextlib
import ipaddress
import logging
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType

import psutil

from tfdist.errors import InputError
from tfdist.launcher.orphan_guard import OrphanGuard

READ_SECONDS = 1.0  # from one reading to the next
PROGRAM_SECONDS = 30.0  # that a program may take
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")  # by which a host calls itself
_LINE = re.compile(r"(?P<name>\[[0-9A-Fa-f:]+\]|[^\s:=\[\]]+)(?::(?P<slots>\d+)|\s+slots=(?P<slots_too>\d+))?")

_log = logging.getLogger("tfdist.launch")


def parse(text: str, source: str) -> dict[str, int]:
    """Reads lines such as `node7:4`, `node7 slots=4` or `node7`, which has one slot; # begins a comment.

    Args:
      text: the lines.
      source: where they come from, for messages.

    Returns:
      The slots of each name; those of a name that stands there twice are added.

    Raises:
      InputError: a line is none of these.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if line and not match:
            raise InputError(f'Lines of --hosts must be NAME:SLOTS. Received: "{line}" in line {number} of {source}.')
        if match:
            name = match["name"].strip("[]")
            slots[name] = slots.get(name, 0) + int(match["slots"] or match["slots_too"] or 1)
    return slots


class Programs:
    """Runs programs, one at a time; another thread may end the one that runs, and then no other begins."""

    def __init__(self, guard: OrphanGuard | None = None):
        """Args: guard: ends a program that runs if this process is killed."""
        self._guard = guard
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._ended = False

    def printed(self, path: str) -> str:
        """What a program prints; it is ended, with all that it has started, when its time is over."""
        with self._begun(path) as program:
            out, err = program.communicate(timeout=PROGRAM_SECONDS)
        if program.returncode:
            raise subprocess.CalledProcessError(program.returncode, path, out, err)
        return out.decode(errors="replace")

    def end(self) -> None:
        """Ends the program that runs, if one does, with all that it has started."""
        with self._lock:
            self._ended = True
            if self._running and self._running.returncode is None:
                _kill(self._running)

    @contextlib.contextmanager
    def _begun(self, path: str) -> Iterator[subprocess.Popen[bytes]]:
        program = self._begin(path)
        try:
            with program:
                try:
                    yield program
                except BaseException:
                    _kill(program)
                    raise
        finally:
            with self._lock:
                self._running = None
            if self._guard:
                self._guard.forget(program.pid)

    def _begin(self, path: str) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise OSError("the job is over")
            self._running = program = subprocess.Popen(
                [os.path.abspath(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            if self._guard:
                self._guard.add(program.pid)
            return program


def _kill(program: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def read(path: str, programs: Programs) -> dict[str, int]:
    """Reads a file, or what a file that is executable prints.

    Args:
      path: the file.
      programs: runs it.

    Raises:
      InputError: it cannot be read, fails, or says something else.
    """
    try:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            text, source = programs.printed(path), f"what {path} prints"
        else:
            with open(path, encoding="utf-8") as file:
                text, source = file.read(), path
        if slots := parse(text, source):
            return slots
        problem = "it names none"  # as a file does that is just being written
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        problem = f"code {error.returncode}" + (f" ({said[-1]})" if said else "")
    except subprocess.TimeoutExpired:
        problem = f"no end within {PROGRAM_SECONDS:g} s"
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    raise InputError(f"--hosts must be a file, or a program, that lists hosts. Received: {path}: {problem}.")


class Hosts:
    """What `--hosts` says now; read again in a thread, as a program may take its time. A context manager.

    What cannot be read later is a warning, and what was said before stays. That there are fewer slots is believed when it is
    read twice: a file may be half written.
    """

    def __init__(self, path: str, guard: OrphanGuard | None = None):
        """Reads it for the first time.

        Args:
          path: of the file, or the program.
          guard: see `Programs`.

        Raises:
          InputError: see `read`.
        """
        self._path, self._programs = path, Programs(guard)
        self._slots = read(path, self._programs)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hosts", daemon=True)

    @property
    def slots(self) -> Mapping[str, int]:
        """By name, in the order of the lines."""
        return self._slots

    def __enter__(self) -> "Hosts":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._programs.end()
        self._thread.join(READ_SECONDS)

    def _follow(self) -> None:
        problem, last = "", self._slots
        while not self._ended.wait(READ_SECONDS):
            try:
                now, problem = read(self._path, self._programs), ""
                if now == last or sum(now.values()) >= sum(self._slots.values()):
                    self._slots = now
                last = now
            except InputError as error:
                if str(error) != problem and not self._ended.is_set():
                    problem = str(error)
                    _log.warning("tfdist.launch: %s What it said before stays.", problem)


def own_names() -> list[str]:
    """What others may call this host in such a list: its name, and the addresses at which they can reach it."""
    held = [one for some in psutil.net_if_addrs().values() for one in some]
    addresses = {one.address.partition("%")[0] for one in held if one.family in (socket.AF_INET, socket.AF_INET6)}
    return [socket.gethostname(), *sorted(address for address in addresses if _is_for_others(address))]


def _is_for_others(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def is_named(name: str, names: list[str]) -> bool:
    """Whether a name of the list is one of a host's; with or without its domain, and by any address of the loopback."""
    if name in names:
        return True
    if re.fullmatch(r"127(\.\d+){3}", name):
        return "127.0.0.1" in names
    return any(name.partition(".")[0] == own.partition(".")[0] for own in names if not _is_address(own)) and (
        not _is_address(name)
    )


def _is_address(name: str) -> bool:
    return bool(re.fullmatch(r"\d+(\.\d+){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:]*", name))
