"""Replicas in threads that exchange eager tensors: several ranks without tracing."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica, Wire

DEADLINE = 60  # seconds that a rank waits for the others

Together = Callable[..., list[Any]]


class _Meeting:
    """Exchanges values between all ranks."""

    def __init__(self, replicas: int):
        self._barrier = threading.Barrier(replicas)
        self._put: dict[tuple[str, int], Any] = {}

    def exchange(self, name: str, rank: int, value: Any) -> list[Any]:
        assert (name, rank) not in self._put, f"the name {name} is used for one call only"
        self._put[name, rank] = value
        self._barrier.wait(DEADLINE)
        return [self._put[name, other] for other in range(self._barrier.parties)]

    def abort(self) -> None:
        self._barrier.abort()


class _Thread(Collectives):
    """The collectives of one rank."""

    def __init__(self, meeting: _Meeting, rank: int, size: int, wire: Wire):
        self._meeting, self._rank, self.size, self.wire = meeting, rank, size, wire

    @property
    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum", *, name: str) -> list[tf.Tensor]:
        combine = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}[op]
        everyone = self._meeting.exchange(name, self._rank, list(tensors))
        return [combine(tf.stack(each), axis=0) for each in zip(*everyone, strict=True)]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        assert {tensor.dtype for tensor in tensors} <= self.wire.gathers
        everyone = self._meeting.exchange(name, self._rank, list(tensors))
        return [tf.concat(each, axis=0) for each in zip(*everyone, strict=True)]


def wire(packed: tf.DType = tf.uint8, exchanges: bool = False) -> Wire:
    return Wire(OneReplica.wire.reduces, OneReplica.wire.gathers, packed, exchanges)


@pytest.fixture
def together() -> Together:
    """Calls a function of the collectives concurrently on each rank; returns the results."""

    def call(
        replicas: int, function: Callable[[Collectives], Any], packed: tf.DType = tf.uint8, exchanges: bool = False
    ) -> list[Any]:
        meeting = _Meeting(replicas)

        def one(rank: int) -> Any:
            try:
                return function(_Thread(meeting, rank, replicas, wire(packed, exchanges)))
            except BaseException:
                meeting.abort()
                raise

        with ThreadPoolExecutor(replicas) as threads:
            futures = [threads.submit(one, rank) for rank in range(replicas)]
        failures = [future.exception() for future in futures if future.exception() is not None]
        for failure in failures:
            if not isinstance(failure, threading.BrokenBarrierError):
                raise failure
        return [future.result() for future in futures]

    return call
