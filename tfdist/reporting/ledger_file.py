"""Which examples a process has used: what `python -m tfdist.ledger` proves with that each was used once in an epoch.

A file is a sequence of calls of the compiled loop: three numbers, the first step, how many steps and how many examples, then
the examples' numbers in the order of use. Every number is an int64, little-endian. A crash may leave the last call unfinished.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tfdist.errors import InputError
from tfdist.reporting.writing import GrowingFile, must_write

_NUMBER = np.dtype("<i8")
_HEAD = 3


class NullLedger:
    """Keeps nothing."""

    def write(self, first_step: int, steps: int, numbers: np.ndarray) -> None:
        """See `LedgerFile`."""

    def sync(self) -> None:
        """See `LedgerFile`."""

    def close(self) -> None:
        """See `LedgerFile`."""


class LedgerFile(NullLedger):
    """Appends the examples of each call; what was written survives the process, and behind `sync` the machine."""

    def __init__(self, path: str | os.PathLike[str]):
        """Makes the file, with its directory if need be; it must not be there.

        Raises:
          WriteError: it cannot be made. What follows raises it, too, where the disk is full.
        """
        with must_write(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = GrowingFile(path, is_new=True)

    def write(self, first_step: int, steps: int, numbers: np.ndarray) -> None:
        """Appends one call.

        Args:
          first_step: of the call.
          steps: how many it made.
          numbers: [examples] integers, in the order of use, equally many a step.
        """
        head = np.asarray([first_step, steps, len(numbers)], _NUMBER)
        self._file.write(head.tobytes() + np.asarray(numbers, _NUMBER).tobytes())

    def sync(self) -> None:
        """Returns when everything is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def read_ledger(path: str | os.PathLike[str]) -> Iterator[tuple[int, np.ndarray]]:
    """The steps of a file, in the order of writing: each step's number and its examples.

    Raises:
      InputError: this is no such file.
    """
    found = np.fromfile(path, _NUMBER)
    at = 0
    while at + _HEAD <= len(found):
        first, steps, count = (int(number) for number in found[at : at + _HEAD])
        if first < 0 or steps < 1 or count < 0 or count % steps:
            raise InputError(
                f"A ledger's file holds calls of the loop. Received: {path}, which does not at number {at}."
            )
        end = at + _HEAD + count
        if end > len(found):
            return
        yield from enumerate(found[at + _HEAD : end].reshape(steps, count // steps), first)
        at = end
