"""Collectives of any number of replicas, each of which is a thread: without an engine, and eager."""

import concurrent.futures
import queue
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op
from tfdist.collectives.single_replica import ANYTHING, Wire


class Messages:
    """The queues of messages, by sender, receiver and tag."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int, str], queue.SimpleQueue] = {}

    def __getitem__(self, key: tuple[int, int, str]) -> queue.SimpleQueue:
        """Returns one queue per key: two threads that ask at once get the same, as `setdefault` is atomic."""
        return self._queues.setdefault(key, queue.SimpleQueue())


class Thread(Collectives):
    """One replica of a group."""

    def __init__(self, ranks: Sequence[int], rank: int, messages: Messages, native_all_to_all: bool):
        self.size, self._ranks, self._rank, self._messages = len(ranks), tuple(ranks), rank, messages
        self.wire = Wire(reduces=ANYTHING, gathers=ANYTHING, packed=tf.uint8, native_all_to_all=native_all_to_all)

    @property
    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        return [tf.add_n(self._everyones(tensor, f"{name}/{i}")) for i, tensor in enumerate(tensors)]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return [tf.concat(self._everyones(tensor, f"{name}/{i}"), 0) for i, tensor in enumerate(tensors)]

    def group(self, ranks: Sequence[int]) -> "Thread":
        chosen = self.checked(ranks)
        native_all_to_all = self.wire.native_all_to_all
        return Thread(
            [self._ranks[rank] for rank in chosen], chosen.index(self._rank), self._messages, native_all_to_all
        )

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        self._messages[self._ranks[self._rank], self._ranks[to], tag].put(list(tensors))
        return tf.constant(0)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        return self._messages[self._ranks[source], self._ranks[self._rank], tag].get(timeout=300)

    def _everyones(self, tensor: tf.Tensor, name: str) -> list[tf.Tensor]:
        tag = f"{name} of {self._ranks}"
        others = [rank for rank in range(self.size) if rank != self._rank]
        for rank in others:
            self.send([tensor], rank, tag=tag)
        parts = {rank: self.receive([], rank, tag=tag)[0] for rank in others}
        return [parts.get(rank, tensor) for rank in range(self.size)]


def run(replicas: int, function: Callable[[Collectives], Any], *, native_all_to_all: bool = False) -> list[Any]:
    """Returns the results of a function of each replica's collectives.

    Args:
      replicas: number of replicas.
      function: called in a thread of each.
      native_all_to_all: see `Wire`.
    """
    messages = Messages()
    everyone = [Thread(range(replicas), rank, messages, native_all_to_all) for rank in range(replicas)]
    with concurrent.futures.ThreadPoolExecutor(replicas) as pool:
        return list(pool.map(function, everyone))
