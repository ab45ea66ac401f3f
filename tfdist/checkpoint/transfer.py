"""Transfers bytes between processes over a strategy's collectives, for data that is too large for the group."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError

_AT_ONCE = 64 << 20  # total bytes that all processes send at once; an engine may deliver all of them to each process


class ByteTransfer:
    """Sends bytes between processes while nothing else is sent.

    All processes must make the same calls, from their main thread. Each process sends from its first replica.

    Attributes:
      piece: maximum bytes that a process sends at once.
    """

    def __init__(self, strategy: Strategy):
        """Initializes the transfer without compiling anything.

        Args:
          strategy: strategy of the processes.

        Raises:
          InputError: it has no collectives between its processes.
        """
        check_can_transfer(strategy)
        self._strategy = strategy
        self._packed = strategy.collectives.wire.packed
        self._local = len(strategy.local_replicas)
        self.piece = max(_AT_ONCE // strategy.replicas, 1 << 10)
        self._to_one = self._traced(self._exchange)
        self._to_all = self._traced(self._gather)

    def to_one(self, data: np.ndarray, process: int) -> dict[int, np.ndarray]:
        """Sends bytes from each process to one other process.

        Args:
          data: uint8, of any length.
          process: the receiver.

        Returns:
          What other processes have sent to this one, uint8, by rank.
        """
        plans = self._strategy.group.gather("carrying/to one", [data.size, process], LONG_SECONDS)
        me = self._strategy.cluster.rank
        mine = {rank: np.empty(size, np.uint8) for rank, (size, to) in enumerate(plans) if to == me}
        for begin in range(0, max(size for size, _ in plans), self.piece):
            received = self._sent(self._to_one, data[begin : begin + self.piece], process)
            for whole in mine.values():
                received = self._take(received, whole[begin : begin + self.piece])
        return mine

    def to_all(self, data: np.ndarray) -> dict[int, np.ndarray]:
        """Sends the bytes of each process to all processes.

        Args:
          data: uint8, at most `piece` bytes; must not be empty on all processes.

        Returns:
          What each process has sent, uint8, by rank; empty arrays for those that sent nothing.
        """
        sizes = self._strategy.group.gather("carrying/to all", data.size, LONG_SECONDS)
        received = self._sent(self._to_all, data)
        found = {}
        for rank, size in enumerate(sizes):
            found[rank] = np.empty(size, np.uint8)
            received = self._take(received, found[rank])
        return found

    def _sent(self, function: Any, data: np.ndarray, process: int = 0) -> np.ndarray:
        packed = np.zeros(self._padded(data.size), np.uint8)
        packed[: data.size] = data
        words = packed.view(self._packed.as_numpy_dtype)
        splits = np.zeros(self._strategy.replicas, np.int32)
        splits[process * self._local] = words.size
        sent = function()(tf.constant(words), tf.constant(splits))
        return np.asarray(self._strategy.local(sent)[0]).view(np.uint8)

    def _take(self, received: np.ndarray, into: np.ndarray) -> np.ndarray:
        """Copies the first bytes into an array; returns the following ones."""
        into[:] = received[: into.size]
        return received[self._padded(into.size) :]

    def _padded(self, size: int) -> int:
        """Returns the number of bytes including padding."""
        return -(-size // self._packed.size) * self._packed.size

    def _traced(self, function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Any:
        """Returns a lazily traced replica function, the same on all processes, whatever is sent."""
        compiled: Any = self._strategy.compiled(lambda *given: self._strategy.run(function, *given))
        splits = tf.TensorSpec([self._strategy.replicas], tf.int32)
        return functools.cache(lambda: compiled.get_concrete_function(tf.TensorSpec([None], self._packed), splits))

    def _exchange(self, data: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        own = self._own()
        sent = data[: tf.size(data) * own]
        return self._strategy.collectives.all_to_all([sent], splits=splits * own, name="carrying/to_one")[0]

    def _gather(self, data: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return self._strategy.collectives.all_gather([data[: tf.size(data) * self._own()]], name="carrying/to_all")[0]

    def _own(self) -> tf.Tensor:
        """Returns 1 on a process's first replica, else 0."""
        return tf.cast(tf.equal(self._strategy.collectives.rank % self._local, 0), tf.int32)


def can_transfer(strategy: Strategy) -> bool:
    """Returns whether a strategy's processes can send each other bytes, whose number is known only at run time."""
    # With other collectives of the job, a replica is spread over processes.
    return not strategy.compiles_replicas and strategy.job_collectives is strategy.collectives


def check_can_transfer(strategy: Strategy) -> None:
    """Raises `InputError` if a strategy's processes cannot send each other bytes."""
    if not can_transfer(strategy):
        raise InputError(
            "Commits of hosts that share no directory are sent over the collectives of the strategy. Received: "
            f"{strategy.name}, which has none between processes. Give a --commit_dir that all hosts share, or leave "
            "out --commit_every."
        )
