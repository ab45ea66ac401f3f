"""Fields of a record, and lines of the log, about rows that late ranks have left out."""

import numpy as np

from tfdist.errors.counts import count_of

_TOO_MANY = 0.5  # fraction of the rows of a record


def fields_of(dropped: np.ndarray) -> dict[str, int]:
    """Returns the fields of a record; empty if no rank can leave out rows.

    Args:
      dropped: [2, replicas]; numbers of rows and of micro-steps that each replica left out.
    """
    if not dropped.size:
        return {}
    rows, micro_steps = dropped
    most = {"dropped_rank": int(rows.argmax())} if rows.any() else {}
    return {"dropped_rows": int(rows.sum()), "dropped_micro_steps": int(micro_steps.sum()), **most}


class DroppedRows:
    """Names ranks that leave out rows: at the first ones, and whenever their number has doubled."""

    def __init__(self, step: int, batch_size: int) -> None:
        """Initializes without observations.

        Args:
          step: updates done so far.
          batch_size: global batch size.
        """
        self._first, self._batch_size = step, batch_size
        self._total = np.zeros([2, 0], np.int64)
        self._said = np.zeros([0], np.int64)

    def observe(self, dropped: np.ndarray, step: int) -> str | None:
        """Returns a line about the ranks that have dropped many rows since the last line about them; None if none has.

        Args:
          dropped: see `fields_of`; of the steps since the last call.
          step: updates done so far.
        """
        if dropped.shape[1] != self._total.shape[1]:
            self._total, self._said = np.zeros_like(dropped), np.zeros_like(dropped[0])
        self._total = self._total + dropped
        rows, micro_steps = self._total
        named = np.flatnonzero((rows > 0) & (rows >= 2 * self._said)).tolist()
        if not named:
            return None
        self._said[named] = rows[named]
        of_ranks = ", ".join(f"rank {i} {rows[i]} ({count_of(int(micro_steps[i]), 'micro-step')})" for i in named)
        fraction = rows.sum() / max((step - self._first) * self._batch_size, 1)
        remedy = " Most rows are dropped: use a larger limit." if fraction > _TOO_MANY else ""
        return f"Rows dropped by step {step}: {of_ranks}; {100 * fraction:.1f}% of all.{remedy}"
