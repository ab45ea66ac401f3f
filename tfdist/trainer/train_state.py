"""`TrainState`, what changes during a run besides variables, and the speeds of its replicas."""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Self

from tfdist.checkpoint.best import Best, BestValue, best_of
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.format import Checkpoint
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.data.row_partition import apportion, rows
from tfdist.data.stream import StreamPosition
from tfdist.step.running_metrics import Progress

LEAST_GAIN = 0.05  # of the slowest replica's time, for a change of the allocation
_OBSERVATIONS = 3  # of an allocation before it may change
_KEPT = 9  # the latest observations of an allocation
_ALLOCATIONS = 4  # of which observations are kept
_NEW_SPEED = 1.3  # ratio of medians of the first and the last observations of an allocation
_STEPS, _MOST_STEPS = 10, 40  # of an observation
_UNCHANGED = 5  # decisions in a row, after which observations are made less often


class Line(NamedTuple):
    """A replica's time as a function of its rows: seconds = fixed + per_row * rows.

    Attributes:
      fixed: seconds of a step without rows, at least 0.
      per_row: seconds per row, more than 0.
    """

    fixed: float
    per_row: float

    def __call__(self, count: int) -> float:
        """Returns the seconds for a number of rows."""
        return self.fixed + self.per_row * count


@dataclasses.dataclass
class ObservedAllocation:
    """An allocation and the times that were observed with it.

    Attributes:
      step: first step of the allocation.
      counts: rows of each replica.
      seconds: observations, each with the seconds per step of each replica.
    """

    step: int
    counts: list[int]
    seconds: list[list[float]] = dataclasses.field(default_factory=list)

    def medians(self) -> list[float]:
        """Returns the median of each replica's observations."""
        return [median(times) for times in zip(*self.seconds, strict=True)]


class ReplicaSpeeds:
    """Observes the times of replicas and proposes how to allocate the rows; part of the state of a run.

    A replica's line is fitted through the medians of the current allocation and of the earlier one that differs most in this
    replica's rows. With one number of rows, its time is taken to be proportional to its rows. All methods are
    deterministic, so that equal observations give equal proposals.

    Attributes:
      allocations: the allocations so far that still count, in order; the last one is current, or begins soon.
      steps: number of steps of an observation; more when the allocation has not changed for long.
    """

    def __init__(self, allocations: list[ObservedAllocation], unchanged: int = 0):
        """Initializes the speeds; `unchanged`: decisions since the last change."""
        self.allocations = allocations
        self._unchanged = unchanged

    @classmethod
    def begun(cls, step: int, batch_size: int, replicas: int) -> Self:
        """Returns the speeds of replicas of which nothing is known: rows are allocated evenly from a step on."""
        return cls([ObservedAllocation(step, [rows(batch_size, replica, replicas)[1] for replica in range(replicas)])])

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Returns the speeds that `to_json` has saved."""
        return cls([ObservedAllocation(**each) for each in saved["deals"]], saved["unchanged"])

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON, for a checkpoint."""
        return {
            "deals": [dataclasses.asdict(each) for each in self.allocations],
            "unchanged": self._unchanged,
        }

    def on(self, step: int, batch_size: int, replicas: int) -> Self:
        """Returns the speeds with which a run continues at a step.

        Of other replicas nothing is known, so that they begin evenly. Another batch size is allocated in the proportions of
        the last one.
        """
        counts = self.allocations[-1].counts
        if len(counts) != replicas:
            return self.begun(step, batch_size, replicas)
        if sum(counts) != batch_size:
            return type(self)([ObservedAllocation(step, list(apportion(batch_size, counts)))])
        return self

    @property
    def steps(self) -> int:
        """Number of steps of an observation."""
        return min(_STEPS << self._unchanged // _UNCHANGED, _MOST_STEPS)

    @property
    def counts(self) -> list[int]:
        """Rows of each replica in the last allocation."""
        return self.allocations[-1].counts

    def observe(self, seconds: Sequence[float]) -> None:
        """Adds the seconds per step of each replica with the last allocation."""
        current = self.allocations[-1]
        current.seconds = [*current.seconds[-_KEPT + 1 :], list(seconds)]
        if len(current.seconds) >= 2 * _OBSERVATIONS and self._has_new_speed(current.seconds):
            current.seconds = current.seconds[-_OBSERVATIONS:]
            self.allocations = [current]

    def propose(self) -> list[int] | None:
        """Returns the rows of each replica with which the slowest takes least time; None to keep the allocation.

        An allocation is kept unless another one is expected to save `LEAST_GAIN` of the time, so that noise does not change it.
        """
        current = self.allocations[-1]
        if len(current.seconds) < _OBSERVATIONS:
            return None
        lines = self.lines()
        counts = fastest_allocation(sum(current.counts), lines)
        if self.expected(counts) > (1 - LEAST_GAIN) * max(current.medians()):
            return None
        return counts

    def keep(self) -> None:
        """Records that the allocation is kept; the next observations are longer."""
        self._unchanged += len(self.allocations[-1].seconds) >= _OBSERVATIONS

    def change(self, step: int, counts: Sequence[int]) -> None:
        """Begins another allocation at a step."""
        self.allocations = [
            *(each for each in self.allocations if each.seconds),
            ObservedAllocation(step, list(counts)),
        ][-_ALLOCATIONS:]
        self._unchanged = 0

    def expected(self, counts: Sequence[int]) -> float:
        """Returns the expected seconds of the slowest replica with an allocation."""
        return max(line(count) for line, count in zip(self.lines(), counts, strict=True))

    def lines(self) -> list[Line]:
        """Returns the line of each replica; there must be an observation of the last allocation."""
        *earlier, current = self.allocations
        known = [(each.counts, each.medians()) for each in earlier if len(each.seconds) >= _OBSERVATIONS]
        return [
            _line((count, seconds), [(counts[i], medians[i]) for counts, medians in known])
            for i, (count, seconds) in enumerate(zip(current.counts, current.medians(), strict=True))
        ]

    @staticmethod
    def _has_new_speed(seconds: list[list[float]]) -> bool:
        first, last = seconds[:_OBSERVATIONS], seconds[-_OBSERVATIONS:]
        of_replicas = zip(zip(*first, strict=True), zip(*last, strict=True), strict=True)
        return any(
            not 1 / _NEW_SPEED < median(after) / max(median(before), 1e-9) < _NEW_SPEED for before, after in of_replicas
        )


def _line(current: tuple[int, float], others: Sequence[tuple[int, float]]) -> Line:
    """Returns the line through the current point and the one that is farthest from it, or through the origin."""
    count, seconds = current
    proportional = Line(0.0, max(seconds, 1e-9) / count)
    other_count, other_seconds = max(others, key=lambda point: abs(point[0] - count), default=current)
    if abs(other_count - count) < max(1, 0.1 * count):  # noise would determine the slope
        return proportional
    # A slope near 0 would move all rows at once.
    slope = max((other_seconds - seconds) / (other_count - count), proportional.per_row / 4)
    fixed = seconds - slope * count
    return Line(fixed, slope) if fixed > 0 else proportional


def fastest_allocation(batch_size: int, lines: Sequence[Line]) -> list[int]:
    """Returns the rows of each replica, at least 1, that minimize the time of the slowest.

    Each row goes to the replica that would have it done first, which is optimal as times only grow with rows.

    Args:
      batch_size: rows of a batch, at least one for each replica.
      lines: line of each replica.
    """
    counts = [1] * len(lines)
    ends = [(line(2), i) for i, line in enumerate(lines)]
    heapq.heapify(ends)
    for _ in range(batch_size - len(lines)):
        _, i = ends[0]
        counts[i] += 1
        heapq.heapreplace(ends, (lines[i](counts[i] + 1), i))
    return counts


class TrainState:
    """The step, the position in the data, running metrics and callbacks' state; a `FitLoop` owns it during a run.

    Attributes:
      step: number of updates done.
      progress: running metrics since the last record and in the current epoch.
      callbacks: state of the Keras callbacks.
      best: follows the metric whose best value is kept; None if the last run had none.
      best_before: the best value before the next run.
      speeds: measured speeds of the replicas, and how rows are allocated by them; None unless they are measured.
      resumed_from: path of the checkpoint from which it was restored; "" for none.
      read_before: number of examples that earlier runs of this process used, since a resume if there was one.
    """

    def __init__(self, is_chief: bool) -> None:
        """Initializes the state of step 0; `is_chief`: whether callbacks' state is saved from this process."""
        self.step = 0
        self.progress = Progress()
        self.callbacks = CallbackStates(is_chief)
        self.best: BestValue | None = None
        self.resumed_from = ""
        self.best_before: Best | None = None
        self.speeds: ReplicaSpeeds | None = None
        self._begun_at: int | None = None  # of an unfinished run
        self._batches: BatchSchedule | None = None  # of an unfinished run
        self._position: StreamPosition | None = None  # where the last run has ended
        self._size: int | None = None  # of its data
        self.read_before = 0

    def batch_schedule(self, size: int, batch_size: int, parts: int, elastic_batch: str) -> BatchSchedule:
        """Returns the schedule with which training continues; changes nothing.

        Args:
          size: number of examples per epoch.
          batch_size: global batch size.
          parts: number of parts into which a batch is split.
          elastic_batch: see `Schedule`.
        """
        begun_at = self.step if self._begun_at is None else self._begun_at
        position = self._position or StreamPosition(batch_size)
        if self._size not in (None, size):  # other data, which begins with an epoch of its own
            epochs = -(-position.examples_before(begun_at) // size)
            position = StreamPosition(batch_size, begun_at, epochs * size)
        schedule = self._batches or BatchSchedule.initial(position, begun_at, size, batch_size, parts)
        return schedule.from_step(parts, self.step, batch_size, elastic_batch)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restores the values of a checkpoint; its variables are restored before."""
        self.resumed_from = str(checkpoint.path)
        self.step, self._batches = checkpoint.step, BatchSchedule.from_json(checkpoint.values["batch_schedule"])
        self._begun_at, self._position, self._size = self._batches.begun_at, None, None
        self.read_before = 0
        self.progress = Progress(checkpoint.values["progress"])
        self.best_before = best_of(checkpoint.values)
        self.speeds = ReplicaSpeeds.of(checkpoint.values["speeds"]) if "speeds" in checkpoint.values else None

    def values(self, batches: BatchSchedule) -> Mapping[str, Any]:
        """Returns the state as JSON, for a checkpoint; `batches` is the schedule of the run in progress."""
        best = {"best": list(self.best.best)} if self.best and self.best.best else {}
        speeds = {"speeds": self.speeds.to_json()} if self.speeds else {}
        progress = self.progress.to_json()
        return {"batch_schedule": batches.to_json(), "progress": progress, **best, **speeds}

    def end_run(self, batches: BatchSchedule, size: int) -> None:
        """Records that a run has ended, or failed: the next one continues at its position in data of the same size."""
        self.progress, self._begun_at = self.progress.next_run(), None
        self.best_before = self.best.best if self.best else None
        self._batches, self._position, self._size = None, batches.position, size
        self.read_before = batches.position.examples_before(self.step)
