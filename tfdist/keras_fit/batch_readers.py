"""Reads Keras's batches, which are the same on every process, and distributes their rows to replicas."""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.coordination.group import name_ranks
from tfdist.data.batches import split_batches
from tfdist.data.row_partition import strip_none
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.step.validation import differing_data_error

COMPARE_EVERY = 100  # maximum number of batches between two comparisons


class GlobalBatches:
    """A dataset of global batches, the same on every process; each pass over it is a `BatchReader`.

    Attributes:
      strategy: strategy that distributes their rows.
      deadline: maximum number of seconds to wait for the other processes.
      batches_per_pass: number of batches in a pass; None if unknown until the first pass has ended.
      spec: structure of `tf.TensorSpec` of a batch, with None for parts that Keras omits.
    """

    def __init__(
        self,
        batches: tf.data.Dataset,
        strategy: Strategy,
        name: str,
        batches_per_pass: int | None,
        deadline: float,
        spec: Any,
        *,
        trains: bool = False,
    ):
        """Initializes without starting a pass; `name` identifies the call that reads `batches`; `trains` if it is `fit`."""
        self._batch_parts = strategy.training_shares if trains else (strategy.local_replicas, strategy.replicas)
        self.strategy, self.deadline, self.batches_per_pass, self.spec = strategy, deadline, batches_per_pass, spec
        self._batches, self._name, self._passes = batches, name, 0
        self._checksums: dict[int, int] = {}
        self._reader: BatchReader | None = None

    def __iter__(self) -> "BatchReader":
        """Starts a pass; only one may be in progress."""
        self._passes += 1
        self._checksums.clear()
        rows = self.strategy.distribute(lambda *_: self._replica_batches)
        self._reader = BatchReader(self, rows, self._checksums, f"{self._name}/{self._passes}")
        return self._reader

    def compare_remaining(self) -> None:
        """Compares the batches read in the current pass, if there is one, that have not been compared yet."""
        if self._reader is not None:
            self._reader.compare_remaining()

    @functools.cached_property
    def _replica_batches(self) -> tf.data.Dataset:
        """The rows of this process's replicas; traced once for all passes."""
        has_peers = self.strategy.cluster.size > 1
        return split_batches(self._batches, *self._batch_parts, self._checksums.__setitem__ if has_peers else None)


class BatchReader:
    """An iterator over the rows of this process's replicas in each global batch of a pass, for `Strategy.run`.

    Processes compare checksums of their batches after 1, 2, 4, ... 128 batches, and then after every `COMPARE_EVERY` batches.
    Differences in the first batches are therefore reported early, and messages do not slow down long passes. Every process must
    call the methods in the same order. Methods that compare batches raise `InputError` if they differ.
    """

    def __init__(self, data: GlobalBatches, rows: Iterator[Any], checksums: dict[int, int], name: str):
        self.rows, self.spec = rows, data.spec  # the engine's iterator over the rows, and the spec of `GlobalBatches`
        self._data, self._checksums, self._name = data, checksums, name
        self._position = self._compared_count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the rows of the next batch; if the length is unknown, processes agree on whether there is one."""
        batch = self._next_batch()
        if batch is None:
            self.compare_all()
            raise StopIteration
        self.advance(1)
        return batch

    @property
    def has_known_length(self) -> bool:
        """Whether the number of batches in the pass is known."""
        return self._data.batches_per_pass is not None

    @property
    def is_at_start(self) -> bool:
        """Whether no batch has been taken."""
        return self._position == 0

    def next_count(self, limit: int) -> int:
        """Returns the number of batches for the next call, at most `limit` and at most the rest of the pass."""
        batches_per_pass = self._data.batches_per_pass
        return 1 if batches_per_pass is None else min(limit, batches_per_pass - self._position % batches_per_pass)

    @property
    def is_at_end(self) -> bool:
        """Whether a pass over the data, whose length is known, is complete."""
        return self._data.batches_per_pass is not None and self._position % self._data.batches_per_pass == 0

    def advance(self, count: int) -> None:
        """Records that `count` batches were taken; compares them if a comparison is due or the pass is complete."""
        self._position += count
        interval = max(1, min(self._compared_count, COMPARE_EVERY))
        if self.is_at_end or self._position >= self._compared_count + interval:
            self._compare(self._position)

    def compare_remaining(self) -> None:
        """Compares batches that were taken but not compared; every process must have taken the same number."""
        self._compare(self._position)

    def compare_all(self) -> None:
        """Compares the batches that were not compared, after the end of the data."""
        self._compare(max(self._checksums, default=-1) + 1)

    def _compare(self, count: int) -> None:
        strategy, start = self._data.strategy, self._compared_count
        if strategy.cluster.size == 1 or count <= start:
            return
        self._compared_count = count
        checksums = [self._checksums.pop(index) for index in range(start, count)]
        if not strategy.peers.all_equal(f"batch/{self._name}/{start}", checksums, self._data.deadline):
            batches = f"batch {start}" if count == start + 1 else f"batches {start} to {count - 1}"
            raise differing_data_error(
                f"a difference between the {strategy.peers.size} processes in {batches} of {self._name}"
            )

    def _next_batch(self) -> Any:
        batch = next(self.rows, None)
        if self.has_known_length:
            return batch
        name = f"more/{self._name}/{self._position}"
        group = self._data.strategy.group
        has_batch = group.gather(name, batch is not None, self._data.deadline)
        if len(set(has_batch)) > 1:
            ended_ranks = name_ranks([group.ranks[i] for i, has_next in enumerate(has_batch) if not has_next])
            raise InputError(
                "Every process must read the same batches, so that all passes have the same length. Received: data "
                f"of {self._position} batches on {ended_ranks}, and more on the others. Do not shard the data by rank."
            )
        if batch is None and self._position:
            self._data.batches_per_pass = self._position
        return batch


def batch_spec(spec: Any) -> Any:
    """Returns the spec of a batch, with None for parts that Keras omits, except trailing parts."""
    return strip_none(
        tf.nest.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None, spec)
    )
