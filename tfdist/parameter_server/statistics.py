"""Statistics of updates on parameter servers, for training records."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.parameter_server.coordinator import RangeResult

_WAITS = ("data", "workers", "pull", "push")


class Statistics:
    """Counts the updates, the times and the bytes of all workers between two records.

    The work of a worker is a mapping of numbers by name: `examples`, the seconds of `compute` and of the waits for `data`, for
    other `workers` and for answers to `pull` and `push`, and the bytes `pull/0` and `push/0` of messages to and from server 0.
    Workers send it with their commits; what follows the last commit of a range counts for the next one. The coordinator
    measures the waits for other workers: for a step that the order of updates permits, and at the beginning and end of a range,
    in which the workers meet.
    """

    def __init__(self, workers: int, update_seconds: Sequence[float], *, counts_staleness: bool = True):
        """Starts to count.

        Args:
          workers: number of workers.
          update_seconds: for each server, time in which it has applied updates so far.
          counts_staleness: whether gradients may be stale.
        """
        self._workers, self._update_seconds = workers, update_seconds
        self._counts_staleness = counts_staleness
        self._reset(update_seconds)

    def _reset(self, update_seconds: Sequence[float]) -> None:
        self._first_update_seconds = update_seconds
        self._seconds = 0.0
        self._updates = [0] * self._workers
        self._work: list[dict[str, float]] = [collections.defaultdict(float) for _ in range(self._workers)]
        self._staleness: collections.Counter[int] = collections.Counter()  # the largest of the servers
        self._staleness_by_server: list[collections.Counter[int]] = [collections.Counter() for _ in update_seconds]

    def add(self, result: RangeResult, seconds: float, update_seconds: Sequence[float]) -> None:
        """Adds a range of tickets.

        Args:
          result: its result for worker 0.
          seconds: its wall time.
          update_seconds: for each server, time in which it has applied updates so far.
        """
        self._seconds += seconds
        self._update_seconds = update_seconds
        for total, work in zip(self._work, result.work, strict=False):
            for name, value in work.items():
                total[name] += value
        for update in result.updates:
            if not update.factor:
                continue
            for worker in update.workers:
                self._updates[worker] += 1
            ages = [update.version - version for version in update.versions] if self._counts_staleness else []
            for number, age in enumerate(ages):
                self._staleness_by_server[number % len(self._staleness_by_server)][age] += 1
            self._staleness.update([max(ages)] if ages else [])

    def take_fields(self) -> dict[str, Any]:
        """Returns the fields of a training record, and starts to count again; {} without updates."""
        count = self._staleness.total()
        fields: dict[str, Any] = {}
        if count:
            mean = sum(age * number for age, number in self._staleness.items()) / count
            histograms = [{str(age): c[age] for age in sorted(c)} for c in self._staleness_by_server]
            fields = {"staleness": mean, "max_staleness": max(self._staleness), "staleness_histogram": histograms}
        if self._seconds:
            fields["workers"] = [*map(self._worker_fields, self._updates, self._work)]
            fields["servers"] = [*map(self._server_fields, range(len(self._update_seconds)))]
        self._reset(self._update_seconds)
        return fields

    def _worker_fields(self, updates: int, work: Mapping[str, float]) -> dict[str, Any]:
        return {
            "updates": updates,
            "updates_per_second": updates / self._seconds,
            "examples_per_second": work.get("examples", 0) / self._seconds,
            "compute_seconds": work.get("compute", 0.0),
            "wait_seconds": {cause: work.get(cause, 0.0) for cause in _WAITS},
        }

    def _server_fields(self, server: int) -> dict[str, float]:
        pulled, pushed = (int(sum(work[f"{method}/{server}"] for work in self._work)) for method in ("pull", "push"))
        seconds = self._update_seconds[server] - self._first_update_seconds[server]
        return {"pulled_bytes": pulled, "pushed_bytes": pushed, "update_seconds": seconds}
