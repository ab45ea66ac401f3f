"""Readers of Keras's batches, which all processes read in the same order; rows are distributed to replicas."""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.data.batches import split_batches
from tfdist.data.row_partition import without_absent
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError

COMPARE_EVERY = 100  # maximum number of batches between two comparisons


def next_comparison(compared: int) -> int:
    """Returns the number of batches of a pass after which to compare again: 1, 2, 4, ... 128, then every `COMPARE_EVERY`.

    Differences in the first batches are reported at once, and long passes are not slowed down: a comparison sends a message.

    Args:
      compared: number of batches compared so far.
    """
    return compared + max(1, min(compared, COMPARE_EVERY))


class BatchComparison:
    """Compares the batches of one pass by their checksums. All processes must call each method together."""

    def __init__(self, checksums: dict[int, int], strategy: Strategy, name: str, deadline: float):
        """Initializes the comparison.

        Args:
          checksums: by number of batch, for batches that were read; those compared are removed.
          strategy: strategy whose processes have read them.
          name: name of the pass.
          deadline: seconds to wait for the other processes.
        """
        self._checksums, self._strategy, self._name, self._deadline = checksums, strategy, name, deadline
        self._compared, self._next = 0, next_comparison(0)

    def advance(self, count: int, is_end: bool) -> None:
        """Compares the batches since the last comparison if that is due.

        Args:
          count: number of batches taken so far.
          is_end: whether the pass ends here.

        Raises:
          InputError: the batches differ.
        """
        if self._strategy.cluster.size > 1 and self._compared < count and (is_end or count >= self._next):
            self._compare(count)

    def compare_all(self) -> None:
        """Compares the remaining batches at the end of the data.

        Raises:
          InputError: the batches differ.
        """
        self.advance(max(self._checksums, default=-1) + 1, is_end=True)

    def _compare(self, count: int) -> None:
        first, self._compared, self._next = self._compared, count, next_comparison(count)
        checksums, peers = [self._checksums.pop(number) for number in range(first, count)], self._strategy.peers
        if not peers.all_equal(f"batch/{self._name}/{first}", checksums, self._deadline):
            batches = f"batch {first}" if count == first + 1 else f"batches {first} to {count - 1}"
            raise InputError(
                "Every process must read the same batches, in the same order: each keeps its replicas' rows of them. "
                f"Received: a difference between the {peers.size} processes in {batches} of {self._name}. Call "
                "keras.utils.set_random_seed before the data is shuffled, and leave out sharding by rank "
                "and parallel maps that draw random numbers."
            )


class GlobalBatches:
    """A data set of global batches, the same on every process; each pass over it is a `BatchReader`.

    Attributes:
      strategy: strategy that distributes their rows.
      deadline: seconds to wait for the other processes.
      batches_per_pass: batches in a pass; None if unknown until the first pass has ended.
      spec: structure of `tf.TensorSpec` of a batch, with None for what Keras leaves out.
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
        """Describes the passes without starting one.

        Args:
          batches: Keras's batches.
          strategy: see above.
          name: name of the call that reads them.
          batches_per_pass: see above.
          deadline: see above.
          spec: see above.
          trains: whether the batches are for training.
        """
        self._shares = strategy.training_shares if trains else (strategy.local_replicas, strategy.replicas)
        self.strategy, self.deadline, self.batches_per_pass, self.spec = strategy, deadline, batches_per_pass, spec
        self._batches, self._name, self._passes = batches, name, 0
        self._checksums: dict[int, int] = {}
        self._reader: BatchReader | None = None
        self._split_batches = functools.cache(self._split)  # traced once and read in each pass

    def __iter__(self) -> "BatchReader":
        """Starts a pass; only one may be in progress."""
        self._passes += 1
        self._checksums.clear()
        rows = self.strategy.distribute(lambda *_: self._split_batches())
        name = f"{self._name}/{self._passes}"
        comparison = BatchComparison(self._checksums, self.strategy, name, self.deadline)
        self._reader = BatchReader(self, rows, comparison, name)
        return self._reader

    def compare_rest(self) -> None:
        """Compares the remaining batches of the current pass, if there is one; see `BatchReader.compare_rest`."""
        if self._reader is not None:
            self._reader.compare_rest()

    def _split(self) -> tf.data.Dataset:
        has_peers = self.strategy.cluster.size > 1
        return split_batches(self._batches, *self._shares, self._checksums.__setitem__ if has_peers else None)


class BatchReader:
    """An iterator over this process's replicas' rows of each global batch, in the form that `Strategy.run` accepts.

    Attributes:
      rows: the engine's own iterator over them.
      spec: see `GlobalBatches`.
    """

    def __init__(self, data: GlobalBatches, rows: Iterator[Any], comparison: BatchComparison, name: str):
        self.rows, self.spec = rows, data.spec
        self._data, self._comparison, self._name = data, comparison, name
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next batch's rows; if the length of the pass is unknown, processes agree whether there is one."""
        batch = self._next()
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
    def at_start(self) -> bool:
        """Whether no batch has been taken yet."""
        return self._position == 0

    def next_count(self, limit: int) -> int:
        """Returns how many batches to take now, up to `limit`, so that a pass ends with a call."""
        batches_per_pass = self._data.batches_per_pass
        return 1 if batches_per_pass is None else min(limit, batches_per_pass - self._position % batches_per_pass)

    @property
    def at_end(self) -> bool:
        """Whether a pass over the data is complete."""
        return self._data.batches_per_pass is not None and self._position % self._data.batches_per_pass == 0

    def advance(self, count: int) -> None:
        """Counts batches that were taken; compares them over processes when that is due, and when a pass is complete."""
        self._position += count
        self._comparison.advance(self._position, self.at_end)

    def compare_rest(self) -> None:
        """Compares the remaining batches; every process must have read the same number of them."""
        self._comparison.advance(self._position, is_end=True)

    def compare_all(self) -> None:
        """Compares what was read, after the data has ended."""
        self._comparison.compare_all()

    def _next(self) -> Any:
        batch = next(self.rows, None)
        if self.has_known_length:
            return batch
        name = f"more/{self._name}/{self._position}"
        has_batch = self._data.strategy.group.gather(name, batch is not None, self._data.deadline)
        if len(set(has_batch)) > 1:
            ended = self._data.strategy.group.named(rank for rank, more in enumerate(has_batch) if not more)
            raise InputError(
                "Every process must read the same batches, so that all passes have the same length. Received: data of "
                f"{self._position} batches on {ended}, and more on the others. Leave out sharding by rank."
            )
        if batch is None and self._position:
            self._data.batches_per_pass = self._position
        return batch


def batch_spec(spec: Any) -> Any:
    """Returns the spec of a batch, with None for what Keras leaves out, unless it is at the end."""
    return without_absent(
        tf.nest.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None, spec)
    )
