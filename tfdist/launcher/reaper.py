"""Kills process groups after the launcher that started them has been killed.

A separate program, which imports nothing of tfdist. It reads process group ids from standard input, one per line; a
negative one removes a group. A line that is a path names a directory to remove with them. The line `done` means that the
launcher has ended everything itself; the end of the input without it means that the launcher was killed.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    """Reads the input until its end; see the module docstring."""
    groups, directories = set(), []
    for line in sys.stdin:
        if line == "done\n":
            return
        if line.startswith("/"):
            directories.append(line.rstrip("\n"))
            continue
        group = int(line)
        if group > 0:
            groups.add(group)
        else:
            groups.discard(-group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:  # no process of it is left
            pass
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
