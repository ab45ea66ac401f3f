"""The hosts of an elastic job and their slots, read from a file or from the output of a program."""

import contextlib
import ipaddress
import itertools
import logging
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from socket import AF_INET, AF_INET6
from typing import Any

import psutil

from tfdist.errors import InputError

READ_SECONDS = 1.0  # interval between two reads
PROGRAM_SECONDS = 30.0  # time limit of the program
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")  # names by which a host refers to itself
_LINE = re.compile(r"(?P<name>\[[0-9A-Fa-f:]+\]|[^\s:=\[\]]+)(?::(?P<slots>\d+)|\s+slots=(?P<slots_option>\d+))?")

_log = logging.getLogger("tfdist.launch")


def parse(text: str, source: str) -> dict[str, int]:
    """Parses lines such as `node7:4`, `node7 slots=4` or `node7` (one slot); # begins a comment.

    Returns the number of slots by host name, summed over duplicate names.

    Raises:
      InputError: a line is invalid.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        line_match = _LINE.fullmatch(line)
        if line and not line_match:
            raise InputError(f'Lines of --hosts must be NAME:SLOTS. Received: "{line}" in line {number} of {source}.')
        if line_match:
            name = line_match["name"].strip("[]")
            slots[name] = slots.get(name, 0) + int(line_match["slots"] or line_match["slots_option"] or 1)
    return slots


def read(path: str) -> dict[str, int]:
    """Reads the slots from a file, or from the output of an executable file.

    Raises:
      InputError: the file cannot be read, the program fails, or the contents are invalid.
    """
    try:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "check": True}
            program = subprocess.run([os.path.abspath(path)], timeout=PROGRAM_SECONDS, **options)
            text, source = program.stdout.decode(errors="replace"), f"the output of {path}"
        else:
            with open(path, encoding="utf-8") as file:
                text, source = file.read(), path
        if slots := parse(text, source):
            return slots
        problem = "it lists no hosts"  # for example, while the file is being written
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        problem = f"code {error.returncode}" + (f" ({lines[-1]})" if lines else "")
    except subprocess.TimeoutExpired:
        problem = f"still running after {PROGRAM_SECONDS:g} s"
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    raise InputError(f"--hosts must be a file, or a program, that lists hosts. Received: {path}: {problem}.")


@contextlib.contextmanager
def watched_slots(path: str) -> Iterator[Callable[[], Mapping[str, int]]]:
    """Yields a function that returns the current slots by name, which a thread reads periodically, as a program may be slow.

    If a later read fails, it logs a warning and keeps the previous contents. A smaller total number of slots takes effect
    after it has been read twice, because a file may be incomplete while it is being written.

    Raises:
      InputError: the first read fails; see `read`.
    """
    current_slots, ended = read(path), threading.Event()

    def read_periodically() -> None:
        nonlocal current_slots
        problem, last_slots = "", current_slots
        while not ended.wait(READ_SECONDS):
            try:
                slots, problem = read(path), ""
                if slots == last_slots or sum(slots.values()) >= sum(current_slots.values()):
                    current_slots = slots
                last_slots = slots
            except InputError as error:
                if str(error) != problem and not ended.is_set():
                    problem = str(error)
                    _log.warning("tfdist launch: %s The previous list of hosts stays in use.", problem)

    thread = threading.Thread(target=read_periodically, name="hosts", daemon=True)
    thread.start()
    try:
        yield lambda: current_slots
    finally:
        ended.set()
        thread.join(READ_SECONDS)


def local_host_names() -> list[str]:
    """Returns the names of this host in a host list: its host name, and the addresses that other hosts can reach."""
    infos = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    addresses = {
        ipaddress.ip_address(info.address.partition("%")[0]) for info in infos if info.family in (AF_INET, AF_INET6)
    }
    reachable_addresses = (str(a) for a in addresses if not (a.is_loopback or a.is_link_local))
    return [socket.gethostname(), *sorted(reachable_addresses)]


def matches_host(name: str, names: list[str]) -> bool:
    """Returns whether a name in a host list is one of a host's names and addresses.

    Names match with or without their domain, and all IPv4 loopback addresses are equal.
    """
    if name in names:
        return True
    if re.fullmatch(r"127(\.\d+){3}", name):
        return "127.0.0.1" in names
    host_names = [host_name for host_name in names if not _is_address(host_name)]
    return not _is_address(name) and name.partition(".")[0] in [host_name.partition(".")[0] for host_name in host_names]


def _is_address(name: str) -> bool:
    return bool(re.fullmatch(r"\d+(\.\d+){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:]*", name))
