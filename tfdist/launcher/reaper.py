"""Kills the processes of a job after SIGKILL has ended the launcher that started them.

A separate program that does not import tfdist. Its argument, NAME=VALUE, is an environment variable that only processes of the
job have. It reads lines from standard input: a number is a process group, and its negative removes that group; a path is a
directory to remove. The line `done` means that the launcher has ended all of them itself; the end of the input without it
means that the launcher was killed.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection

_WAIT_SECONDS = 5.0  # time for killed processes to end; an uninterruptible sleep may take longer
_POLL_SECONDS = 0.01


def kill_by_variable(variable: str, excluded_ids: Collection[int] = ()) -> None:
    """Kills all processes with an environment variable NAME=VALUE, except for excluded ids, on Linux.

    Returns after two successive searches without a result: a process may start another one while it is being killed, and has
    no variables for a moment while it replaces its program.
    """
    deadline, empty_searches = time.monotonic() + _WAIT_SECONDS, 0
    while empty_searches < 2 and time.monotonic() < deadline:
        pids = [pid for pid in _find_processes(variable.encode()) if pid not in excluded_ids]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # already ended
                os.kill(pid, signal.SIGKILL)
        empty_searches = 0 if pids else empty_searches + 1
        time.sleep(_POLL_SECONDS)


def _find_processes(variable: bytes) -> list[int]:
    pids = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            with open(f"/proc/{int(name)}/environ", "rb") as file:
                variables = file.read().split(b"\0")  # empty if the process has ended
        except (ValueError, OSError):  # not a process, or one of another user
            continue
        if variable in variables:
            pids.append(int(name))
    return pids


def main() -> None:
    """Reads the input until its end; see the module docstring."""
    groups, directories = set(), []
    for line in sys.stdin:
        if line == "done\n":
            return
        if line.startswith("/"):
            directories.append(line.rstrip("\n"))
        elif int(line) > 0:
            groups.add(int(line))
        else:
            groups.discard(-int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # already ended
            os.killpg(group, signal.SIGKILL)
    kill_by_variable(sys.argv[1])
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
