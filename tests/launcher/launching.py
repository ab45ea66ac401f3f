"""Launchers under test, as started by users, with real processes; none of these may be left running."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil

from tests.waiting import DEADLINE, read_line, wait_for
from tfdist.launcher.placement import free_ports

MEMBER = """
import os, sys, time
from tfdist.cluster.environment import from_tf_config
from tfdist.coordination import PeerFailureHandler, join
cluster = from_tf_config(os.environ)
group = join(cluster)
with PeerFailureHandler(group, cluster):
    assert group.gather("ranks", cluster.rank) == list(range(cluster.size))
    {body}
"""


class Launch:
    """A launcher under test."""

    def __init__(
        self, directory: pathlib.Path, mark: str, flags: tuple[str, ...], command: tuple[str, ...], **variables
    ):
        environment = {**os.environ, "MARK": mark, **variables}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.launch", *flags, "--", *command],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out = self.err = ""

    def wait(self) -> int:
        self.out, self.err = self.process.communicate(timeout=DEADLINE)
        print(self.out, self.err, sep="\n--- stderr\n")  # shown by pytest if the test fails
        return self.process.returncode

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def said(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("tfdist launch: ")]

    def read_line(self) -> str:
        return read_line(self.process.stdout)


class Launches:
    """Starts launchers in a directory; asserts at the end that no process is left of those that they have started."""

    def __init__(self, directory: pathlib.Path):
        self._directory, self._mark, self._started = directory, uuid.uuid4().hex, list[Launch]()

    def __enter__(self) -> "Launches":
        return self

    def __call__(self, *command: str, flags: tuple[str, ...] = (), **variables: str) -> Launch:
        self._started.append(Launch(self._directory, self._mark, flags, command, **variables))
        return self._started[-1]

    def running(self, command: str | None = None) -> list[psutil.Process]:
        """Returns the running processes that the test has started, directly or indirectly, and that run a command."""
        return living(lambda process: process.environ().get("MARK") == self._mark and command in (None, process.name()))

    def __exit__(self, *error: Any) -> None:
        for one in self._started:
            one.process.kill()
            one.process.communicate(timeout=DEADLINE)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.running())
        left = self.running()
        for process in left:
            process.kill()
        assert not left


def living(condition: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Returns the processes that meet a condition, except for those that have ended meanwhile, or that may not be asked."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if condition(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def members(group: int) -> list[psutil.Process]:
    """Returns the processes of a group."""
    return living(lambda process: os.getpgid(process.pid) == group)


def ends(pid: int) -> bool:
    """Waits for the end of a process that is not a child of this one; init may leave it a zombie for a while."""
    wait_for(lambda: not living(lambda process: process.pid == pid))
    return True


def python(body: str) -> tuple[str, ...]:
    rank = "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']"
    return sys.executable, "-c", f"import json, os, sys, time\n{rank}\n{body}"


def member(body: str) -> tuple[str, ...]:
    return sys.executable, "-c", MEMBER.format(body=body)


def free_address() -> str:
    return f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"
