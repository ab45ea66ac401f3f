"""Latency and bandwidth of the link between replicas, fitted to all-reduces of two sizes."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import RecordedCall
from tfdist.diagnostics.timing import median_seconds
from tfdist.distribution.strategy import Strategy

SMALL, LARGE = 4 * 1024, 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Link:
    """A model of the time of a message: latency + bytes sent by each replica / bandwidth.

    Attributes:
      latency: in seconds.
      bandwidth: bytes per second that one replica sends.
      replicas: number of replicas.
    """

    latency: float
    bandwidth: float
    replicas: int

    def seconds(self, calls: Sequence[RecordedCall], bandwidth: float | None = None) -> float:
        """Returns the predicted time of consecutive calls, on this link or on one of another bandwidth."""
        return len(calls) * self.latency + self.sent_bytes(calls) / (bandwidth or self.bandwidth)

    def sent_bytes(self, calls: Sequence[RecordedCall]) -> float:
        """Returns the bytes that one replica sends for these calls, by the costs stated in `Collectives`."""
        return sum(self._sent(call) for call in calls)

    def _sent(self, call: RecordedCall) -> float:
        ranks = len(call.ranks) if call.ranks else self.replicas
        around, to_all = (ranks - 1) / ranks, ranks - 1
        ring = {"all_reduce": 2 * around, "all_to_all": around, "reduce_scatter": around}
        return call.payload_bytes * (ring | {"send": 1}).get(call.operation, to_all)


def measure(strategy: Strategy) -> Link:
    """Measures the link by all-reduces of 4 KiB and of 4 MiB; every process must call it."""
    times = {size: _seconds(strategy, size) for size in (SMALL, LARGE)}
    sent = 2 * (strategy.replicas - 1) / strategy.replicas * LARGE
    return Link(times[SMALL], sent / max(times[LARGE] - times[SMALL], 1e-6), strategy.replicas)


def _seconds(strategy: Strategy, size: int) -> float:
    """Returns the median seconds of one all-reduce."""

    def replica_function() -> tf.Tensor:
        data = tf.random.stateless_uniform([size // 4], [0, size])
        [total] = strategy.collectives.all_reduce([data], name=f"link/{size}")
        return tf.reduce_sum(total)

    return median_seconds(strategy, replica_function)
