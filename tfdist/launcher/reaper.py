"""Kills the processes of a job after the launcher that started them has been killed.

A separate program, which imports nothing of tfdist. It reads lines from standard input: NAME=VALUE is the variable that only
processes of the job have in their environment; a number is a process group, removed again by its negative; a path is a
directory to remove with them. The line `done` means that the launcher has ended everything itself; the end of the input without
it means that the launcher was killed.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Collection

_SECONDS = 5.0  # for which killed processes are awaited: those in an uninterruptible sleep may last longer
_PAUSE = 0.01


def kill_marked(variable: str, spare: Collection[int] = ()) -> None:
    """Kills every process that had this variable when its program was started, even outside of its process group (Linux).

    It returns when two searches in succession have found none: a process may start another one while it is being killed, and
    has no variables for a moment while it replaces its program.

    Args:
      variable: NAME=VALUE.
      spare: ids of processes that are not killed.
    """
    deadline, without = time.monotonic() + _SECONDS, 0
    while without < 2 and time.monotonic() < deadline:
        found = [pid for pid in _marked(variable.encode()) if pid not in spare]
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # has ended
                pass
        without = 0 if found else without + 1
        time.sleep(_PAUSE)


def _marked(variable: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            with open(f"/proc/{int(name)}/environ", "rb") as file:
                variables = file.read().split(b"\0")  # none, if the process has ended
        except (ValueError, OSError):  # not a process, or another user's
            continue
        if variable in variables:
            found.append(int(name))
    return found


def main() -> None:
    """Reads the input until its end; see the module docstring."""
    groups, directories, variable = set(), [], ""
    for line in sys.stdin:
        if line == "done\n":
            return
        if line.startswith("/"):
            directories.append(line.rstrip("\n"))
        elif "=" in line:
            variable = line.rstrip("\n")
        elif int(line) > 0:
            groups.add(int(line))
        else:
            groups.discard(-int(line))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:  # no process of it is left
            pass
    if variable:
        kill_marked(variable)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
