"""Pipelines: from a data set to the rows of each replica, step by step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.examples import Element, Examples
from tfdist.data.indexed_batch import IndexedBatch
from tfdist.data.row_partition import Deal, check_equal_shares, in_words, what_shares
from tfdist.errors import InputError

_STEPS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Training: global batches that are a pure function of (seed, first), always full, without end.

    Attributes:
      source: where the examples come from.
      batch_size: examples of a global batch, over all replicas, at least 1; may be more than the source has.
      seed: of the order of examples.
      first: the place in the stream of the first example; the batches are the same as if those before it were skipped.
    """

    source: Examples
    batch_size: int
    seed: int
    first: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_batch_size(self.batch_size)
        if self.first < 0:
            raise InputError(f"The first example's place must be at least 0. Received: {self.first}.")

    def dataset(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """The rows of this process's replicas, in turn; see `numbered`, of whose elements these are the batches."""
        return self._dealt(replicas, size, numbered=False)

    def numbered(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """The rows of this process's replicas, in turn, and which examples they are.

        Args:
          replicas: the numbers of this process's replicas.
          size: the number of all replicas, at most `batch_size`.

        Returns:
          An endless data set of `IndexedBatch`. Element i belongs to batch `i // len(replicas)` from here and to
          `replicas[i % len(replicas)]`. Its leading dim is static if all these replicas have equally many rows.

        Raises:
          InputError: there are more replicas than rows.
        """
        return self._dealt(replicas, size, numbered=True)

    def _dealt(self, replicas: Sequence[int], size: int, numbered: bool) -> tf.data.Dataset:
        check_batch_size(self.batch_size, size)
        deal = Deal(self.batch_size, tuple(replicas), size, self.first)
        dealt = self.source.deal(deal, self.seed)
        return prepared(dealt if numbered else dealt.map(_batch), len(deal.replicas))


@dataclasses.dataclass(frozen=True)
class EvaluationPipeline:
    """Evaluation: one pass in the natural order.

    The last batch is short where the batch size does not divide the number of examples, and is dealt as evenly as any
    other: a replica may get no row of it.

    Attributes:
      source: where the examples come from.
      batch_size: examples at a time, over all replicas, at least 1.
    """

    source: Examples
    batch_size: int

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_batch_size(self.batch_size)

    @property
    def steps(self) -> int:
        """How many batches one pass has."""
        return -(-self.source.size // self.batch_size)

    def dataset(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """The rows of this process's replicas, in turn: `steps * len(replicas)` elements; see `Pipeline.dataset`."""
        deal = Deal(self.batch_size, tuple(replicas), size, total=self.source.size)
        return prepared(self.source.deal(deal, seed=None).map(_batch), len(deal.replicas))


def _batch(element: IndexedBatch) -> Element:
    return element.batch


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"--batch_size must be at least 1. Received: {batch_size}.")


def check_batch_size(batch_size: int, replicas: int, micro_steps: int = 1, equal: bool = False) -> None:
    """Checks that every replica has a row in each micro-step, and, for strategies that need static shapes, equally many.

    On a mesh a replica is a device along the batch's axis.

    Raises:
      InputError: it is not so.
    """
    if equal:
        check_equal_shares(batch_size, replicas, micro_steps)
    if replicas * micro_steps > batch_size:
        raise InputError(
            f"--batch_size must be at least the number of {what_shares(micro_steps)}. Received: --batch_size={batch_size} and "
            f"{in_words(replicas, micro_steps)}. Every replica needs a row of every step."
        )


def prepared(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Reads ahead for a process's replicas, in threads that do not take those of the training step."""
    options: Any = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 0  # as many as there are cores, for sources that decode
    options.threading.max_intra_op_parallelism = 1
    # An iterator's end waits until the thread that tunes wakes, which may take a minute. Without it AUTOTUNE is as many as
    # there are cores, at most 16.
    options.autotune.enabled = False
    return dataset.prefetch(_STEPS_AHEAD * replicas).with_options(options)
