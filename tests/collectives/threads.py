"""Collectives of any number of replicas, each of which is a thread: without an engine, and eager."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica, SupportedDtypes
from tfdist.collectives.interface import Op

_DEADLINE = 300  # seconds that a rank waits for the others


class _Meeting:
    """Exchanges values between all ranks of a group."""

    def __init__(self, replicas: int):
        self._barrier = threading.Barrier(replicas)
        self._put: dict[tuple[str, int], Any] = {}
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._messages: dict[tuple[int, int, str], queue.SimpleQueue] = {}
        self._lock = threading.Lock()

    def of(self, ranks: tuple[int, ...]) -> "_Meeting":
        with self._lock:
            return self._meetings.setdefault(ranks, _Meeting(len(ranks)))

    def messages(self, sender: int, receiver: int, tag: str) -> queue.SimpleQueue:
        with self._lock:
            return self._messages.setdefault((sender, receiver, tag), queue.SimpleQueue())

    def exchange(self, name: str, rank: int, value: Any) -> list[Any]:
        assert (name, rank) not in self._put, f"the name {name} is used for one call only"
        self._put[name, rank] = value
        self._barrier.wait(_DEADLINE)
        return [self._put[name, other] for other in range(self._barrier.parties)]

    def abort(self) -> None:
        self._barrier.abort()
        for meeting in list(self._meetings.values()):
            meeting.abort()


class _Thread(Collectives):
    """The collectives of one rank."""

    def __init__(self, meeting: _Meeting, rank: int, size: int, dtypes: SupportedDtypes):
        self._meeting, self._rank, self.size, self.dtypes = meeting, rank, size, dtypes

    @property
    def rank(self) -> int:
        return self._rank

    def group(self, ranks: Sequence[int]) -> Collectives:
        chosen = self.check_ranks(ranks)
        return _Thread(self._meeting.of(chosen), chosen.index(self._rank), len(chosen), self.dtypes)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        self.check_message(tensors, to, tag)
        self._meeting.messages(self._rank, to, tag).put(list(tensors))
        return tf.constant(0)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        self.check_message(specs, source, tag)
        return self._meeting.messages(source, self._rank, tag).get(timeout=_DEADLINE)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        combine = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}[op]
        everyone = self._meeting.exchange(name, self._rank, list(tensors))
        return [combine(tf.stack(each), axis=0) for each in zip(*everyone, strict=True)]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        assert {tensor.dtype for tensor in tensors} <= self.dtypes.gatherable
        everyone = self._meeting.exchange(name, self._rank, list(tensors))
        return [tf.concat(each, axis=0) for each in zip(*everyone, strict=True)]


def run(
    replicas: int,
    function: Callable[[Collectives], Any],
    *,
    packed: tf.DType = tf.uint8,
    native_all_to_all: bool = False,
) -> list[Any]:
    """Returns the results of a function of each replica's collectives, called in a thread of each; see `SupportedDtypes`."""
    meeting = _Meeting(replicas)
    dtypes = SupportedDtypes(OneReplica.dtypes.reducible, OneReplica.dtypes.gatherable, packed, native_all_to_all)

    def one(rank: int) -> Any:
        try:
            return function(_Thread(meeting, rank, replicas, dtypes))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(replicas) as threads:
        futures = [threads.submit(one, rank) for rank in range(replicas)]
    for failure in filter(None, (future.exception() for future in futures)):
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    return [future.result() for future in futures]
