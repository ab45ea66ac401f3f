"""Tells continuous integration what a landing has changed and which parts of the rotated tests it runs.

    python -m tests.landing          # prints, for example: 5c1e7a09 3/5 17/36

Commits that follow each other within an hour are one landing. The first word is the last commit before the newest landing; the
others say which part of the slow tests, and of `make conformance`, is due: the parts take turns of three hours, by the time of
the newest commit.
"""

import itertools
import subprocess
from collections.abc import Sequence

from tests.import_graph import ROOT

_GAP_SECONDS = 3600
_TURN_SECONDS = 3 * 3600
SLOW_PARTS = 5
CONFORMANCE_PARTS = 36


def first_commits(times: Sequence[int]) -> list[int]:
    """Returns the positions of the commits that begin a landing.

    Args:
      times: seconds since 1970 at which commits were made, the oldest first.
    """
    return [0, *(n for n, (before, time) in enumerate(itertools.pairwise(times), 1) if time - before > _GAP_SECONDS)]


def due(time: int, parts: int) -> str:
    """Returns the slice "N/M" that is due at a time, in seconds since 1970."""
    return f"{time // _TURN_SECONDS % parts + 1}/{parts}"


def main() -> None:
    """Prints the base of the newest landing and the slices that are due."""
    command = ["git", "log", "--first-parent", "--reverse", "--format=%ct %h"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    times, commits = zip(*(line.split() for line in lines), strict=True)
    seconds = [int(time) for time in times]
    base = commits[max(first_commits(seconds)[-1] - 1, 0)]
    print(base, due(seconds[-1], SLOW_PARTS), due(seconds[-1], CONFORMANCE_PARTS))


if __name__ == "__main__":
    main()
