"""Defines inspections, which measure a run between training steps without changing weights, and functions for timing."""

import abc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.distribution.strategy import Strategy
from tfdist.step.compiled_steps import Steps


class RunView(NamedTuple):
    """What an inspection can access of a run."""

    steps: Steps  # compiles probe steps, which run a step for measurement and update no state
    batch_size: int  # number of rows of a global batch
    # Returns the batch of a step for `Strategy.run`, without advancing the training iterator
    batch: Callable[[int], Any]


class Inspection(abc.ABC):
    """Inspects a run before certain steps. Every process has the same inspections, at the same steps."""

    @abc.abstractmethod
    def next_step(self, step: int) -> int | None:
        """Returns the first step, at or after `step`, before which to inspect; None if there is none."""

    @abc.abstractmethod
    def inspect(self, step: int) -> dict[str, float]:
        """Inspects the run before a step returned by `next_step`; returns fields for all later training records."""


class PeriodicInspection(Inspection):
    """Inspects a run every `period` steps; `first` is the first step to inspect, at most `period` (the default)."""

    def __init__(self, period: int, first: int | None = None):
        self._period = period
        self._first = period if first is None else first

    def next_step(self, step: int) -> int | None:
        return self._first if step <= self._first else -(-step // self._period) * self._period


REPEATS = 5  # number of timed calls of which the median is returned


def median_seconds(strategy: Strategy, function: Callable[[], tf.Tensor]) -> float:
    """Compiles a replica function and returns the median seconds until all local replicas have its result."""
    compiled_function = tf.function(lambda: strategy.run(function), autograph=False)

    def call() -> None:
        for value in strategy.local(compiled_function()):
            value.numpy()

    call()  # compiles
    return statistics.median(seconds_of(call) for _ in range(REPEATS))


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], barrier: Callable[[], object], rounds: int
) -> dict[str, list[float]]:
    """Times functions alternately; returns the seconds on this process, by name, in the order of the rounds.

    All processes must make the same calls in the same order. `barrier` returns when all processes have called it.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:  # alternates the order
            # Without a barrier, a process that finished the previous call early would also measure the delay of the others.
            barrier()
            times[name].append(seconds_of(calls[name]))
    return times


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start_time = time.perf_counter()
    call()
    return time.perf_counter() - start_time


def medians_of_slowest(times_by_process: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Returns, for each name, the median over rounds of the time on the slowest process in the round.

    Args:
      times_by_process: result of `time_interleaved` on each process.
    """
    rounds = {name: zip(*(times[name] for times in times_by_process), strict=True) for name in times_by_process[0]}
    return {name: statistics.median(max(seconds) for seconds in rounds[name]) for name in rounds}
