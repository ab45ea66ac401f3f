"""Kills process groups when the launcher that started them is gone. A program of its own; it imports nothing of tfdist.

Their numbers arrive on standard input, one a line; a negative one takes a group back. A line that is a path names a
directory that goes with them. The word `done` says that the launcher has ended all itself; an end of the input without it,
that the launcher was killed.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    """Reads until the end; see the module."""
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
        except ProcessLookupError:  # nobody of it is left
            pass
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
