"""`TrainState`, the state of a run other than variables, and `ReplicaSpeeds`, the speeds of its replicas."""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Self

from tfdist.checkpoint.best import BestTracker, BestValue, parse_best_value
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.format import Checkpoint
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.data.row_partition import apportion, row_range
from tfdist.data.stream import StreamPosition
from tfdist.step.running_metrics import Progress

MIN_GAIN = 0.05  # minimum saving for which the allocation changes, as a fraction of the slowest replica's time
_OBSERVATIONS = 3  # minimum number of observations of an allocation before it changes
_MAX_OBSERVATIONS = 9  # maximum number of observations of an allocation
_MAX_ALLOCATIONS = 4  # maximum number of allocations with observations
_NEW_SPEED = 1.3  # ratio of the medians of the last and first observations from which the speed has changed
OBSERVED_STEPS = 10  # number of steps of an observation


class Line(NamedTuple):
    """A replica's time as a function of its number of rows: seconds = intercept + slope * rows."""

    intercept: float  # seconds of a step without rows, at least 0
    slope: float  # seconds per row, more than 0

    def __call__(self, count: int) -> float:
        return self.intercept + self.slope * count


@dataclasses.dataclass
class ObservedAllocation:
    """An allocation with the observed times of replicas."""

    step: int  # first step of the allocation
    counts: list[int]  # number of rows of each replica
    # Observations, each with the seconds per step of each replica
    seconds: list[list[float]] = dataclasses.field(default_factory=list)

    def medians(self) -> list[float]:
        """Returns the median of each replica's observations."""
        return [median(times) for times in zip(*self.seconds, strict=True)]


class ReplicaSpeeds:
    """Observes the times of replicas and proposes allocations of rows; part of the state of a run.

    A replica's line goes through the medians of the current allocation and of the earlier allocation that differs most in
    the replica's number of rows. With a single number of rows, its time is assumed to be proportional to that number. All
    methods are deterministic, so equal observations give equal proposals.
    """

    def __init__(self, allocations: list[ObservedAllocation]):
        self.allocations = allocations  # the latest allocations, in order; the last is current, or begins soon

    @classmethod
    def initial(cls, step: int, batch_size: int, replicas: int) -> Self:
        """Returns speeds without observations; rows are allocated evenly from a step on."""
        return cls([ObservedAllocation(step, [row_range(batch_size, i, replicas)[1] for i in range(replicas)])])

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restores speeds from the result of `to_json`."""
        return cls([ObservedAllocation(**fields) for fields in values["deals"]])

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON, for a checkpoint."""
        return {"deals": [dataclasses.asdict(allocation) for allocation in self.allocations]}

    def resume(self, step: int, batch_size: int, replicas: int) -> Self:
        """Returns the speeds with which a run continues at a step.

        With a different number of replicas, rows are allocated evenly again. With a different batch size, they are
        allocated in the proportions of the last allocation.
        """
        counts = self.allocations[-1].counts
        if len(counts) != replicas:
            return self.initial(step, batch_size, replicas)
        if sum(counts) != batch_size:
            return type(self)([ObservedAllocation(step, list(apportion(batch_size, counts)))])
        return self

    @property
    def counts(self) -> list[int]:
        """Number of rows of each replica in the last allocation."""
        return self.allocations[-1].counts

    def observe(self, seconds: Sequence[float]) -> None:
        """Adds an observation of the last allocation: the seconds per step of each replica."""
        allocation = self.allocations[-1]
        allocation.seconds = [*allocation.seconds[-_MAX_OBSERVATIONS + 1 :], list(seconds)]
        if len(allocation.seconds) >= 2 * _OBSERVATIONS and self._has_new_speed(allocation.seconds):
            allocation.seconds = allocation.seconds[-_OBSERVATIONS:]
            self.allocations = [allocation]

    def propose(self) -> list[int] | None:
        """Returns the number of rows of each replica that minimizes the time of the slowest; None to keep the allocation.

        To ignore noise, the allocation is kept unless another is expected to save `MIN_GAIN` of the time.
        """
        allocation = self.allocations[-1]
        if len(allocation.seconds) < _OBSERVATIONS:
            return None
        lines = self.lines()
        counts = fastest_allocation(sum(allocation.counts), lines)
        if self.expected_seconds(counts) > (1 - MIN_GAIN) * max(allocation.medians()):
            return None
        return counts

    def change(self, step: int, counts: Sequence[int]) -> None:
        """Records another allocation that begins at a step."""
        self.allocations = [
            *(allocation for allocation in self.allocations if allocation.seconds),
            ObservedAllocation(step, list(counts)),
        ][-_MAX_ALLOCATIONS:]

    def expected_seconds(self, counts: Sequence[int]) -> float:
        """Returns the expected seconds of the slowest replica with an allocation."""
        return max(line(count) for line, count in zip(self.lines(), counts, strict=True))

    def lines(self) -> list[Line]:
        """Returns the line of each replica; there must be an observation of the last allocation."""
        *earlier_allocations, last_allocation = self.allocations
        observations = [(a.counts, a.medians()) for a in earlier_allocations if len(a.seconds) >= _OBSERVATIONS]
        return [
            _line((count, seconds), [(counts[i], medians[i]) for counts, medians in observations])
            for i, (count, seconds) in enumerate(zip(last_allocation.counts, last_allocation.medians(), strict=True))
        ]

    @staticmethod
    def _has_new_speed(seconds: list[list[float]]) -> bool:
        first_observations, last_observations = seconds[:_OBSERVATIONS], seconds[-_OBSERVATIONS:]
        replica_times = zip(zip(*first_observations, strict=True), zip(*last_observations, strict=True), strict=True)
        ratios = [median(last_times) / max(median(first_times), 1e-9) for first_times, last_times in replica_times]
        return any(not 1 / _NEW_SPEED < ratio < _NEW_SPEED for ratio in ratios)


def _line(current_point: tuple[int, float], earlier_points: Sequence[tuple[int, float]]) -> Line:
    """Returns the line through the current point and the one farthest from it, or through the origin."""
    count, seconds = current_point
    proportional = Line(0.0, max(seconds, 1e-9) / count)
    other_count, other_seconds = max(earlier_points, key=lambda point: abs(point[0] - count), default=current_point)
    if abs(other_count - count) < max(1, 0.1 * count):  # the slope would be noise
        return proportional
    # A slope near 0 would move all rows at once.
    slope = max((other_seconds - seconds) / (other_count - count), proportional.slope / 4)
    intercept = seconds - slope * count
    return Line(intercept, slope) if intercept > 0 else proportional


def fastest_allocation(batch_size: int, lines: Sequence[Line]) -> list[int]:
    """Returns the number of rows of each replica, at least 1, that minimizes the time of the slowest, given their lines.

    Each row goes to the replica that would complete it first, which is optimal because times increase with rows.
    """
    counts = [1] * len(lines)
    end_times = [(line(2), i) for i, line in enumerate(lines)]
    heapq.heapify(end_times)
    for _ in range(batch_size - len(lines)):
        _, i = end_times[0]
        counts[i] += 1
        heapq.heapreplace(end_times, (lines[i](counts[i] + 1), i))
    return counts


class TrainState:
    """The step, the position in the data, running metrics and the state of callbacks; a `FitLoop` owns it during a run."""

    def __init__(self, is_chief: bool) -> None:
        """Initializes the state of step 0; only the chief saves the callbacks' state."""
        self.step = 0  # number of completed updates
        self.progress = Progress()  # running metrics since the last record and in the current epoch
        self.callbacks = CallbackStates(is_chief)
        self.best_tracker: BestTracker | None = None  # None if the last run had no metric to track
        self.resumed_from = ""  # path of the checkpoint from which the state was restored; "" for none
        self.initial_best: BestValue | None = None  # the best value at the start of the next run
        self.speeds: ReplicaSpeeds | None = None  # None unless rows are allocated by measured speed
        self._begun_at: int | None = None  # initial step of an unfinished run
        self._batches: BatchSchedule | None = None  # schedule of an unfinished run
        self._position: StreamPosition | None = None  # position in the data at the end of the last run
        self._size: int | None = None  # number of examples per epoch of the last run
        self.examples_read = 0  # number of examples that earlier runs used in this process, since the last resume

    def batch_schedule(self, size: int, batch_size: int, parts: int, elastic_batch: str) -> BatchSchedule:
        """Returns the schedule with which training continues, without changing the state.

        An epoch has `size` examples, and a global batch is split into `parts`; see `Schedule` for `elastic_batch`.
        """
        begun_at = self.step if self._begun_at is None else self._begun_at
        position = self._position or StreamPosition(batch_size)
        if self._size not in (None, size):  # other data begins with a new epoch
            epochs = -(-position.examples_before(begun_at) // size)
            position = StreamPosition(batch_size, begun_at, epochs * size)
        schedule = self._batches or BatchSchedule.initial(position, begun_at, size, batch_size, parts)
        return schedule.from_step(parts, self.step, batch_size, elastic_batch)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restores the other values of a checkpoint, after its variables."""
        self.resumed_from = str(checkpoint.path)
        self.step, self._batches = checkpoint.step, BatchSchedule.from_json(checkpoint.values["batch_schedule"])
        self._begun_at, self._position, self._size = self._batches.begun_at, None, None
        self.examples_read = 0
        self.progress = Progress(checkpoint.values["progress"])
        self.initial_best = parse_best_value(checkpoint.values)
        self.speeds = ReplicaSpeeds.from_json(checkpoint.values["speeds"]) if "speeds" in checkpoint.values else None

    @property
    def examples_used(self) -> int:
        """Number of examples used in the completed steps of a resumed run."""
        return self._batches.position.examples_before(self.step) if self._batches else 0

    def values(self, batches: BatchSchedule) -> Mapping[str, Any]:
        """Returns the state as JSON, for a checkpoint; `batches` is the schedule of the run in progress."""
        best = {"best": list(self.best_tracker.best)} if self.best_tracker and self.best_tracker.best else {}
        speeds = {"speeds": self.speeds.to_json()} if self.speeds else {}
        progress = self.progress.to_json()
        return {"batch_schedule": batches.to_json(), "progress": progress, **best, **speeds}

    def end_run(self, batches: BatchSchedule, size: int) -> None:
        """Records the end or failure of a run; the next run continues at its position if the data has the same size."""
        self.progress, self._begun_at = self.progress.next_run(), None
        self.initial_best = self.best_tracker.best if self.best_tracker else None
        self._batches, self._position, self._size = None, batches.position, size
        self.examples_read = batches.position.examples_before(self.step)
