"""Inspections: measurements between training steps that change no weight. Their interface, and the timing that they share."""

import abc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf

from tfdist.distribution.strategy import Strategy
from tfdist.step.compiled_steps import Steps

T = TypeVar("T")


class RunView(NamedTuple):
    """A run, as seen by an inspection.

    Attributes:
      steps: compiles probe steps.
      batch_size: rows of a global batch.
      batch: returns a batch for `Strategy.run` like that of a step number, without advancing the training iterator.
    """

    steps: Steps
    batch_size: int
    batch: Callable[[int], Any]


class CompiledProbe(Generic[T]):
    """A probe step, or several, for the current compression methods; created again when these change."""

    def __init__(self, steps: Steps, create: Callable[[], T]):
        """Initializes with a function that creates the probe; creates nothing yet."""
        self._steps, self._create = steps, create
        self._overrides: dict[str, str] | None = None

    def get(self) -> T:
        """Returns the probe."""
        if self._overrides != self._steps.overrides:
            self._overrides = dict(self._steps.overrides)
            self._probe = self._create()
        return self._probe


class Inspection(abc.ABC):
    """Inspects a run before certain steps; every process has the same inspections, at the same steps."""

    @abc.abstractmethod
    def next(self, step: int) -> int | None:
        """Returns the first step, at or after `step`, before which to inspect; None if there is none."""

    @abc.abstractmethod
    def inspect(self, step: int) -> dict[str, float]:
        """Inspects the run before a step returned by `next`; returns fields for all later training records."""


class Periodic(Inspection):
    """Inspects a run every `every` steps."""

    def __init__(self, every: int, first: int | None = None):
        """Sets the period.

        Args:
          every: steps between inspections.
          first: step of the first inspection, at most `every`, which is also the default.
        """
        self._every = every
        self._first = every if first is None else first

    def next(self, step: int) -> int | None:
        """See base class."""
        return self._first if step <= self._first else -(-step // self._every) * self._every


REPEATS = 5


def median_seconds(strategy: Strategy, function: Callable[[], tf.Tensor]) -> float:
    """Compiles a replica function and returns the median seconds until all local replicas have its result."""
    compiled = tf.function(lambda: strategy.run(function), autograph=False)

    def call() -> None:
        for value in strategy.local(compiled()):
            value.numpy()

    call()  # compiles
    return statistics.median(seconds_of(call) for _ in range(REPEATS))


class TimingRounds:
    """Times functions in turns. All processes make the same calls in the same order.

    Attributes:
      times: seconds on this process, by name, in the order of the rounds.
    """

    def __init__(self, calls: Mapping[str, Callable[[], object]], together: Callable[[], object], kept: str):
        """Initializes the rounds; calls nothing yet.

        Args:
          calls: functions to time, by name.
          together: a barrier: returns when all processes have called it.
          kept: name of a function that is never dropped.
        """
        self._calls, self._together, self._kept = calls, together, kept
        self._running = list(calls)
        self._slower: dict[str, float] = {}  # multiples of the fastest time at which calls were dropped
        self.times: dict[str, list[float]] = {name: [] for name in calls}

    def run(self, rounds: int) -> None:
        """Runs rounds until there have been this many."""
        for number in range(len(self.times[self._kept]), rounds):
            for name in self._running[:: -1 if number % 2 else 1]:  # so that no call always follows the same one
                # Otherwise a process that was done early with the previous call would time the others' delay.
                self._together()
                self.times[name].append(seconds_of(self._calls[name]))

    def drop(self, medians: Mapping[str, float], limit: float) -> None:
        """Stops timing calls that take longer than a multiple of the time of the fastest.

        Args:
          medians: result of `medians_of_slowest`.
          limit: the multiple, above 1.
        """
        fastest = min(medians[name] for name in self._running)
        dropped = [name for name in self._running if name != self._kept and medians[name] > limit * fastest]
        self._slower |= dict.fromkeys(dropped, limit)
        self._running = [name for name in self._running if name not in dropped]

    def corrected(self, medians: Mapping[str, float]) -> dict[str, float]:
        """Returns the medians, in which a dropped call is at least as slow, relative to the fastest, as when it was dropped."""
        fastest = min(medians[name] for name in self._running)
        return {name: max(median, self._slower.get(name, 0.0) * fastest) for name, median in medians.items()}


def seconds_of(call: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def medians_of_slowest(everyone: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Returns for each name the median over rounds of the time on the process where it was longest in that round.

    Args:
      everyone: `TimingRounds.times` of each process.
    """
    rounds = {name: zip(*(times[name] for times in everyone), strict=True) for name in everyone[0]}
    return {name: statistics.median(max(each) for each in rounds[name]) for name in rounds}
