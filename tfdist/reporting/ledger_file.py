"""Records the examples that a process uses, for `tfdist ledger`, and the updates of parameter servers, for a replay.

The examples prove that each is used once. Their file is a sequence of calls of the compiled loop. Each consists of three
numbers (first step, number of steps, number of examples) and the indices of the examples in the order of use. All numbers are
little-endian int64. The file of updates has a line of JSON for each. After a crash, the last call or line may be incomplete.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import InputError
from tfdist.reporting.file_errors import GrowingFile
from tfdist.storage import AnyPath, path_of, storage_of

_NUMBER = np.dtype("<i8")
_HEAD = 3  # numbers before the indices


class NullLedger:
    """A ledger that records nothing."""

    def write(self, first_step: int, steps: int, numbers: np.ndarray) -> None:
        """Records a call of `steps` steps: [examples] integers, in the order of use, with the same number per step."""

    def write_updates(self, updates: Sequence[Mapping[str, Any]]) -> None:
        """Records the updates of one call, each with its number, `version`."""

    def sync(self) -> None:
        """Flushes the records to disk."""

    def close(self) -> None:
        """Closes the files."""


class LedgerFile(NullLedger):
    """Appends the examples of each call; they survive the end of the process and, after `sync`, of the machine.

    It must not exist. Its methods raise `WriteError` if it cannot be written.
    """

    def __init__(self, path: AnyPath):
        self._file = GrowingFile(path, is_new=True)

    def write(self, first_step: int, steps: int, numbers: np.ndarray) -> None:
        head = np.asarray([first_step, steps, len(numbers)], _NUMBER)
        self._file.write(head.tobytes() + np.asarray(numbers, _NUMBER).tobytes())

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class UpdatesFile(LedgerFile):
    """Appends the updates of parameter servers to a file, and the examples to a ledger."""

    def __init__(self, path: AnyPath, ledger: NullLedger):
        super().__init__(path)
        self._ledger = ledger

    def write(self, first_step: int, steps: int, numbers: np.ndarray) -> None:
        self._ledger.write(first_step, steps, numbers)

    def write_updates(self, updates: Sequence[Mapping[str, Any]]) -> None:
        self._file.write("".join(f"{json.dumps(update)}\n" for update in updates).encode())

    def sync(self) -> None:
        super().sync()
        self._ledger.sync()

    def close(self) -> None:
        super().close()
        self._ledger.close()


def read_ledger(path: AnyPath) -> Iterator[tuple[int, np.ndarray]]:
    """Yields pairs of a step number and the indices of its examples, in the order of writing; raises `InputError`."""
    with storage_of(path).open(path_of(path)) as file:

        def numbers(position: int, count: int) -> np.ndarray:
            return np.frombuffer(file.read(count * _NUMBER.itemsize, position * _NUMBER.itemsize), _NUMBER)

        position, size = 0, file.size // _NUMBER.itemsize
        while position + _HEAD <= size:
            first, steps, count = map(int, numbers(position, _HEAD))
            if first < 0 or steps < 1 or count < 0 or count % steps:
                raise InputError(
                    f"A ledger file must contain calls of the loop. Received: {path}, which has none at entry {position}."
                )
            end = position + _HEAD + count
            if end > size:
                return
            yield from enumerate(numbers(position + _HEAD, count).reshape(steps, count // steps), first)
            position = end
