"""Examples without random access, and a run's position in the stream of examples."""

import abc
import dataclasses
import functools
from typing import Any

import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.interface import tensor_bytes
from tfdist.data.batches import checksum
from tfdist.data.examples import Element, Examples, check_element, map_to_elements, unbatched_spec
from tfdist.data.row_partition import IndexedBatch, RowPartition
from tfdist.errors import InputError

_BUFFER_BYTES = 2**28
_MIN_BUFFER_SIZE = 1000
_CHECKSUM_EXAMPLES = 64  # number of examples whose checksum processes compare before training
_NO_SIZE = {tf.data.INFINITE_CARDINALITY: "infinite", tf.data.UNKNOWN_CARDINALITY: "unknown"}


class SequentialExamples(Examples):
    """Examples without random access.

    Because the examples of a step must not depend on the number of replicas, every process reads all of them and keeps its
    own rows: on N processes, the data is read N times. Resuming at a step reads and discards the preceding examples of its
    epoch. If that is too slow, write a `Source`.
    """

    @property
    def element_spec(self) -> Any:
        return unbatched_spec(self._batches().map(self._transform).element_spec)

    @abc.abstractmethod
    def _batches(self) -> tf.data.Dataset:
        """Returns some batches, of which only `element_spec` is used."""

    @abc.abstractmethod
    def _global_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        """Returns the global batches that `partition` covers, each with the indices of its examples: (indices, examples)."""

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        @keras_internals.without_autograph
        def split(batch_index: tf.Tensor, batch: tuple[tf.Tensor, Element]) -> tf.data.Dataset:
            def replica_batch(replica: tf.Tensor) -> IndexedBatch:
                begin, end, _ = partition.replica_rows(batch_index, replica)
                indices, rows = tf.nest.map_structure(
                    lambda tensor: tf.ensure_shape(tensor[begin:end], [partition.static_count, *tensor.shape[1:]]),
                    batch,
                )
                return IndexedBatch(rows, indices)

            return tf.data.Dataset.range(len(partition.replicas)).map(replica_batch)

        @keras_internals.without_autograph
        def transform(rows: IndexedBatch) -> IndexedBatch:
            return IndexedBatch(keras_internals.with_autograph(self._transform)(*rows.batch), rows.indices)

        rows = self._global_batches(partition, seed).enumerate().flat_map(split)
        rows = rows.apply(tf.data.experimental.assert_cardinality(partition.elements))
        return rows.map(transform, num_parallel_calls=tf.data.AUTOTUNE)


class StreamSource(SequentialExamples):
    """A `tf.data.Dataset` of unbatched examples of known cardinality.

    The examples of an epoch are shuffled in a buffer, seeded by (seed, epoch).
    """

    def __init__(self, dataset: tf.data.Dataset, buffer_size: int | None = None):
        """Wraps the dataset without reading it.

        Args:
          dataset: unbatched examples, (x, y) or (x, y, sample_weight), of equal shapes, in a reproducible order.
          buffer_size: number of examples in the shuffle buffer, at least 1; by default as many as fit in 256 MiB, at least
            1000.

        Raises:
          InputError: the number of examples is unknown, infinite or 0; or an example is not of this form.
        """
        size = int(dataset.cardinality())
        if size < 1:
            received = _NO_SIZE.get(size, str(size))
            raise InputError(
                f"A tf.data.Dataset must have a known, finite number of examples. Received: {received}. "
                "Use dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )
        self.size = size
        check_element(dataset.element_spec)
        self._dataset = dataset = map_to_elements(dataset)
        self._buffer_size = buffer_size or _default_buffer_size(dataset, size)

    @functools.cached_property
    def checksum(self) -> int:
        """See base class. Covers the first examples, which differ if the data is shuffled without a seed, or sharded.

        Reading them advances a shuffle of the dataset to its next order, even in a single process.
        """
        with tf.device("CPU:0"):
            return checksum(next(iter(self._dataset.batch(_CHECKSUM_EXAMPLES))))

    def _batches(self) -> tf.data.Dataset:
        return self._dataset.batch(1)

    def _global_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        examples = self._dataset.enumerate()  # before shuffling
        if seed is None:
            examples = examples.skip(partition.first)
        else:
            examples = self._repeat_epochs(examples, seed, partition.first)
        return examples.batch(partition.batch_size, drop_remainder=partition.total is None)

    def _repeat_epochs(self, indexed_examples: tf.data.Dataset, seed: int, first: int) -> tf.data.Dataset:
        @keras_internals.without_autograph
        def epoch(index: tf.Tensor) -> tf.data.Dataset:
            if not self._shuffle:
                return indexed_examples
            # Sets the seed of this function's graph; otherwise the order would depend on the program's tf.random.set_seed.
            tf.random.set_seed(1 + seed % (2**31 - 2))  # TensorFlow's range of seeds, without 0
            return indexed_examples.shuffle(self._buffer_size, seed=index, reshuffle_each_iteration=False)

        return tf.data.Dataset.counter(first // self.size).flat_map(epoch).skip(first % self.size)


def _default_buffer_size(dataset: tf.data.Dataset, size: int) -> int:
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(spec.shape.is_fully_defined() and spec.dtype != tf.string for spec in specs):
        return min(_MIN_BUFFER_SIZE, size)
    return min(max(_MIN_BUFFER_SIZE, _BUFFER_BYTES // max(sum(map(tensor_bytes, specs)), 1)), size)


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """A position in the stream, after `step` steps and `examples` examples; from there on, steps use `batch_size` examples.

    If the batch size never changes, this is `StreamPosition(batch_size)`, and step k begins at position k * batch_size.

    Attributes:
      batch_size: global batch size, at least 1.
      step: first step with this batch size, at least 0.
      examples: number of examples used in all steps before `step`, at least 0.
    """

    batch_size: int
    step: int = 0
    examples: int = 0

    def examples_before(self, step: int) -> int:
        """Returns the position of a step's first example."""
        return self.examples + (step - self.step) * self.batch_size

    def steps_for(self, examples: int) -> int:
        """Returns the number of steps after which the run has used at least `examples` examples."""
        return self.step - (self.examples - examples) // self.batch_size

    def epoch(self, step: int, size: int) -> int:
        """Returns the epoch of a step's first example, from 0, for epochs of `size` examples."""
        return self.examples_before(step) // size

    def end_of_epoch(self, epoch: int, size: int) -> int:
        """Returns the number of steps after which an epoch is complete; a step may complete several short epochs."""
        return self.steps_for((epoch + 1) * size)

    def epochs_from(self, step: int, size: int) -> int:
        """Returns the position from which the epochs after a step are counted.

        If the previous step completed an epoch, this is the end of that epoch; otherwise it is the step's first example.
        """
        offset = self.examples_before(step) % size
        return self.examples_before(step) - (offset if offset < self.batch_size else 0)

    def with_batch_size(self, step: int, batch_size: int) -> "StreamPosition":
        """Returns the position with another batch size from a step on; `self` if the batch size is unchanged."""
        return self if batch_size == self.batch_size else StreamPosition(batch_size, step, self.examples_before(step))
