"""The records of a run."""

import numbers
from collections.abc import Mapping
from typing import Any


class History:
    """The records of a run, in the schema of metrics.jsonl, and the results of its epochs, as Keras's `fit` returns them.

    Attributes:
      records: all records, in the order in which they were written.
      epoch: numbers of the epochs that ended, from 0.
      history: by name of the loss or a metric, and with `val_` for validation, the results of these epochs; and what
        callbacks have added to the logs in `on_epoch_end`, such as the learning rate.
    """

    def __init__(self) -> None:
        """Creates an empty history."""
        self.records: list[dict[str, Any]] = []
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def __repr__(self) -> str:
        """Names what there is, with the last values."""
        last = "".join(f", {name} {_short(values[-1])}" for name, values in self.history.items())
        return f"<History of epochs {self.epoch[0]} to {self.epoch[-1]}{last}>" if self.epoch else "<History: empty>"

    def end_epoch(self, epoch: int, results: Mapping[str, Any]) -> None:
        """Adds the results of an epoch."""
        self.epoch.append(epoch)
        for name, value in results.items():
            self.history.setdefault(name, []).append(value)

    def last(self, kind: str) -> dict[str, Any]:
        """Returns the last record of a kind.

        Args:
          kind: "train" or "eval".

        Raises:
          KeyError: there is no such record.
        """
        for record in reversed(self.records):
            if record["kind"] == kind:
                return record
        raise KeyError(f"No record of kind {kind!r}. Received kinds: {sorted({r['kind'] for r in self.records})}.")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, numbers.Real) else f"{value!s:.20}"  # a callback may add anything
