"""Bytes from process to process, over a strategy's collectives: what is too large for the group."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.strategy import HasCollectives, Strategy

PIECE = 16 << 20  # bytes that a process hands over at once


class Carrier:
    """Sends bytes while nothing else is sent; all processes make the same calls, from their main thread.

    A process speaks through its first replica.
    """

    def __init__(self, strategy: Strategy):
        """Compiles nothing yet.

        Args:
          strategy: of the processes.

        Raises:
          InputError: it has no collectives between its processes.
        """
        if not can_carry(strategy):
            raise InputError(
                f"Between hosts that share no directory, commits go over a strategy's collectives. Received: {strategy.name}, "
                "which has none for that. Give a --commit_dir that all hosts share, or leave out --commit_every."
            )
        assert isinstance(strategy, HasCollectives)
        self._strategy = strategy
        self._packed = strategy.collectives.wire.packed
        self._local = len(strategy.local_replicas)
        # Captured, not passed: one trace, the same on all processes, whatever has to be sent.
        self._data = tf.Variable(tf.zeros([0], self._packed), shape=[None], trainable=False)
        self._splits = tf.Variable(tf.zeros([strategy.replicas], tf.int32), trainable=False)
        self._to_one = strategy.compiled(lambda: strategy.run(self._exchange))
        self._to_all = strategy.compiled(lambda: strategy.run(self._gather))

    def to_one(self, data: np.ndarray, process: int) -> dict[int, np.ndarray]:
        """Sends bytes to one other process each.

        Args:
          data: uint8, of any length.
          process: the one that gets them.

        Returns:
          What others have sent to this process, uint8, by their number.
        """
        plans = self._strategy.group.gather("carrying/to one", [data.size, process])
        me = self._strategy.cluster.rank
        mine = {rank: np.empty(size, np.uint8) for rank, (size, to) in enumerate(plans) if to == me}
        for begin in range(0, max(size for size, _ in plans), PIECE):
            received = self._sent(self._to_one, data[begin : begin + PIECE], process)
            for whole in mine.values():
                received = _take(received, whole[begin : begin + PIECE], self._padded)
        return mine

    def to_all(self, data: np.ndarray) -> dict[int, np.ndarray]:
        """Sends at most `PIECE` bytes of each process to all.

        Args:
          data: uint8.

        Returns:
          What each has sent, uint8, by its number; nothing for those that had nothing.
        """
        sizes = self._strategy.group.gather("carrying/to all", data.size)
        received = self._sent(self._to_all, data)
        found = {}
        for rank, size in enumerate(sizes):
            found[rank] = np.empty(size, np.uint8)
            received = _take(received, found[rank], self._padded)
        return found

    def _sent(self, function: Any, data: np.ndarray, process: int = 0) -> np.ndarray:
        packed = np.zeros(self._padded(data.size), np.uint8)
        packed[: data.size] = data
        words = packed.view(self._packed.as_numpy_dtype)
        splits = np.zeros(self._strategy.replicas, np.int32)
        splits[process * self._local] = words.size
        self._data.assign(words)
        self._splits.assign(splits)
        return np.asarray(self._strategy.local(function())[0]).view(np.uint8)

    def _padded(self, size: int) -> int:
        """Bytes that so many take on the wire."""
        return -(-size // self._packed.size) * self._packed.size

    def _own(self) -> tf.Tensor:
        """1 on a process's first replica, else 0."""
        return tf.cast(tf.equal(self._strategy.collectives.rank % self._local, 0), tf.int32)

    def _exchange(self) -> tf.Tensor:
        own = self._own()
        data = self._data[: tf.size(self._data) * own]
        return self._strategy.collectives.all_to_all([data], splits=self._splits * own, name="carrying/to_one")[0]

    def _gather(self) -> tf.Tensor:
        data = self._data[: tf.size(self._data) * self._own()]
        return self._strategy.collectives.all_gather([data], name="carrying/to_all")[0]


def can_carry(strategy: Strategy) -> bool:
    """Whether a strategy's processes can send each other bytes."""
    return isinstance(strategy, HasCollectives) and not strategy.global_view and not strategy.compiles_replicas


def _take(received: np.ndarray, into: np.ndarray, padded: Any) -> np.ndarray:
    """Copies the first bytes; returns those behind them."""
    into[:] = received[: into.size]
    return received[padded(into.size) :]
