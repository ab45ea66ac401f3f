"""Chooses a compression method for each gradient by timing communication, encoding and decoding."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import NoCommunication, RecordedCall, RecordingCollectives
from tfdist.config.rules import parse_rules
from tfdist.coordination.group import LONG_SECONDS
from tfdist.distribution.strategy import Strategy
from tfdist.gradients.compression import EXACT, Choice, create
from tfdist.trainer.inspections import Inspection, RunView, median_seconds

SMALL_BYTES, LARGE_BYTES = 4 * 1024, 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Link:
    """A model of the time of a collective call: latency + bytes sent by each replica / bandwidth."""

    latency: float  # in seconds
    bandwidth: float  # bytes per second that one replica sends
    replicas: int

    def seconds(self, calls: Sequence[RecordedCall]) -> float:
        """Returns the predicted time of consecutive calls."""
        return len(calls) * self.latency + self.sent_bytes(calls) / self.bandwidth

    def sent_bytes(self, calls: Sequence[RecordedCall]) -> float:
        """Returns the bytes that one replica sends for these calls, according to the costs documented in `Collectives`."""
        total = 0.0
        for call in calls:
            ranks = len(call.ranks) if call.ranks else self.replicas
            ring = (ranks - 1) / ranks
            factors = {"all_reduce": 2 * ring, "all_to_all": ring, "reduce_scatter": ring, "send": 1}
            total += call.payload_bytes * factors.get(call.operation, ranks - 1)
        return total


def measure(strategy: Strategy) -> Link:
    """Measures the link with all-reduces of 4 KiB and 4 MiB; every process must call this function."""
    latency, large_seconds = (_message_seconds(strategy, size) for size in (SMALL_BYTES, LARGE_BYTES))
    sent_bytes = 2 * (strategy.replicas - 1) / strategy.replicas * LARGE_BYTES
    return Link(latency, sent_bytes / max(large_seconds - latency, 1e-6), strategy.replicas)


def _message_seconds(strategy: Strategy, size: int) -> float:
    def replica_function() -> tf.Tensor:
        data = tf.random.stateless_uniform([size // 4], [0, size])
        [total] = strategy.collectives.all_reduce([data], name=f"link/{size}")
        return tf.reduce_sum(total)

    return median_seconds(strategy, replica_function)


MAX_TIME_RATIO = 0.9  # a method is chosen if it takes less than this fraction of the uncompressed all-reduce's time

_log = logging.getLogger(__name__)


class Cost(NamedTuple):
    """Cost of one method for one gradient."""

    codec_seconds: float  # time to encode and decode
    calls: list[RecordedCall]

    def seconds(self, link: Link) -> float:
        """Returns the predicted time of the method."""
        return self.codec_seconds + link.seconds(self.calls)


class AutoCompression(Inspection):
    """Measures the link and the candidates once, and chooses a method for each gradient."""

    def __init__(self, run_view: RunView, choice: Choice):
        self._run_view, self._measure_step, self._candidates = run_view, choice.after, choice.candidates

    def next_step(self, step: int) -> int | None:
        return self._measure_step if step <= self._measure_step else None

    def inspect(self, step: int) -> dict[str, float]:
        steps = self._run_view.steps
        link = measure(steps.strategy)
        costs = {
            spec.name: {method: self._measure_cost(method, spec) for method in self._candidates}
            for spec in steps.compressible()
        }
        choice = {name: fastest_method(link, candidates) for name, candidates in costs.items()}
        choice = steps.strategy.peers.broadcast("auto", choice, LONG_SECONDS)
        steps.choose_methods(choice, self._candidates)
        if steps.strategy.is_chief:
            _log_choice(link, costs, choice)
        return {}

    def _measure_cost(self, method: str, spec: tf.TensorSpec) -> Cost:
        """Times a method on random numbers, on all local replicas at the same time, as in a step."""
        strategy = self._run_view.steps.strategy
        reducer = create(parse_rules(method)[0].methods)
        states = reducer.state([spec])
        recordings: list[RecordingCollectives] = []

        def replica_function() -> tf.Tensor:
            recordings.append(RecordingCollectives(NoCommunication(strategy.collectives)))
            tensor = tf.random.stateless_normal(spec.shape, [1, 2], dtype=spec.dtype)
            result = reducer.reduce([tensor], [s.initial_value() for s in states], recordings[-1], name="auto")
            return tf.add_n([tf.reduce_sum(tf.cast(x, tf.float32)) for x in (*result.totals, *result.state)])

        return Cost(median_seconds(strategy, replica_function), recordings[-1].calls)


def fastest_method(link: Link, costs: Mapping[str, Cost]) -> str:
    """Returns the fastest method, or `EXACT` (no compression) unless another is faster by more than measurement noise."""
    seconds = {method: cost.seconds(link) for method, cost in costs.items()}
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < MAX_TIME_RATIO * seconds[EXACT] else EXACT


def _log_choice(link: Link, costs: Mapping[str, dict[str, Cost]], choice: Mapping[str, str]) -> None:
    _log.info(
        "--compression=auto: measured a latency of %.3g ms per message and a bandwidth of %.3g Mbit/s per replica.",
        1e3 * link.latency, 8e-6 * link.bandwidth
    )  # fmt: skip
    for name, method in choice.items():
        table = ", ".join(f"{m} {1e3 * cost.seconds(link):.3g} ms" for m, cost in costs[name].items())
        _log.info("--compression=auto: %s uses %s. Predicted times: %s.", name, method, table)
