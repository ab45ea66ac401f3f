"""Records the examples that a process uses, for `tfdist ledger`, and the updates of parameter servers, for a replay.

The ledger proves that each example is used once. Each call of the compiled loop appends three integers (first step, number of
steps, number of examples) and the indices of the examples in the order of use, all as little-endian int64. The file of updates
has a line of JSON for each update. After a crash, the last call or line may be incomplete.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import InputError
from tfdist.reporting.file_errors import AppendOnlyFile
from tfdist.storage import AnyPath, path_of, storage_of

_INTEGER = np.dtype("<i8")
_HEAD = 3  # integers before the indices


class NullLedger:
    """A ledger that records nothing."""

    def write(self, first_step: int, steps: int, indices: np.ndarray) -> None:
        """Records a call of `steps` steps; `indices` are [examples], in the order of use, equally many per step."""

    def write_updates(self, updates: Sequence[Mapping[str, Any]]) -> None:
        """Records the updates of one call, each with its number, `version`."""

    def sync(self) -> None:
        """Flushes the records to disk."""

    def close(self) -> None:
        """Closes the files."""


class LedgerFile(NullLedger):
    """Appends the examples of each call; they survive a crash of the process and, after `sync`, a crash of the machine.

    The file must not exist. The methods raise `WriteError` if it cannot be written.
    """

    def __init__(self, path: AnyPath):
        self._file = AppendOnlyFile(path, is_new=True)

    def write(self, first_step: int, steps: int, indices: np.ndarray) -> None:
        head = np.asarray([first_step, steps, len(indices)], _INTEGER)
        self._file.write(head.tobytes() + np.asarray(indices, _INTEGER).tobytes())

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class UpdatesFile(LedgerFile):
    """Appends the updates of parameter servers to a file, and the examples to a ledger."""

    def __init__(self, path: AnyPath, ledger: NullLedger):
        super().__init__(path)
        self._ledger = ledger

    def write(self, first_step: int, steps: int, indices: np.ndarray) -> None:
        self._ledger.write(first_step, steps, indices)

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

        def integers(position: int, count: int) -> np.ndarray:
            return np.frombuffer(file.read(count * _INTEGER.itemsize, position * _INTEGER.itemsize), _INTEGER)

        position, size = 0, file.size // _INTEGER.itemsize
        while position + _HEAD <= size:
            first, steps, count = map(int, integers(position, _HEAD))
            if first < 0 or steps < 1 or count < 0 or count % steps:
                raise InputError(
                    f"A ledger must consist of calls of the loop. Received: {path}, with other data at entry {position}."
                )
            end = position + _HEAD + count
            if end > size:
                return
            yield from enumerate(integers(position + _HEAD, count).reshape(steps, count // steps), first)
            position = end
