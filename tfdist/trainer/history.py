"""The records of a run."""

from typing import Any


class History:
    """The records of a run, in the schema of metrics.jsonl.

    Attributes:
      records: all records, in the order in which they were written.
    """

    def __init__(self) -> None:
        """Creates an empty history."""
        self.records: list[dict[str, Any]] = []

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
