"""Which hosts may run processes of an elastic job, and how many each: a file, or a program that prints the same."""

import logging
import os
import re
import socket
import subprocess
import threading
from collections.abc import Mapping
from types import TracebackType

import psutil

from tfdist.errors import InputError

READ_SECONDS = 1.0  # from one reading to the next
PROGRAM_SECONDS = 30.0  # that a program may take
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


def read(path: str) -> dict[str, int]:
    """Reads a file, or what a file that is executable prints.

    Raises:
      InputError: it cannot be read, fails, or says something else.
    """
    try:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            done = subprocess.run(
                [os.path.abspath(path)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROGRAM_SECONDS,
                check=True,
            )
            return parse(done.stdout.decode(errors="replace"), f"what {path} prints")
        with open(path, encoding="utf-8") as file:
            return parse(file.read(), path)
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

    What cannot be read later is a warning, and what was said before stays.
    """

    def __init__(self, path: str):
        """Reads it for the first time.

        Raises:
          InputError: see `read`.
        """
        self._path = path
        self._slots = read(path)
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
        self._thread.join()

    def _follow(self) -> None:
        problem = ""
        while not self._ended.wait(READ_SECONDS):
            try:
                self._slots, problem = read(self._path), ""
            except InputError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("tfdist.launch: %s What it said before stays.", problem)


def own_names() -> list[str]:
    """What this host may be called in such a list: its name, and its addresses."""
    addresses = {one.address.partition("%")[0] for held in psutil.net_if_addrs().values() for one in held}
    return ["localhost", socket.gethostname(), *sorted(addresses)]


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
