"""`Trainer.predict`: each replica computes its rows, and every process gets all outputs in the order of the rows."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import using
from tfdist.collectives.counted_rows import counting
from tfdist.collectives.gathering import gathered
from tfdist.data import Examples, Source
from tfdist.data.inputs import Padded
from tfdist.data.pipeline import one_pass
from tfdist.data.replica_rows import ReplicaRows
from tfdist.data.row_partition import RowPartition
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.step import randomness
from tfdist.step.data_mismatch import must_fit
from tfdist.step.partitioned_step import partitioned


class Predictor:
    """Predicts with one model; caches compiled functions.

    Cost: one all-gather of the outputs of a batch, so that the outputs must fit into the memory of each process.
    """

    def __init__(self, model: keras.Model, strategy: HasCollectives, seed: int, *, is_partitioned: bool = False):
        """Initializes the predictor.

        Args:
          model: model built under the strategy's scope.
          strategy: strategy on which it predicts.
          seed: seed of the run.
          is_partitioned: whether outputs for a row may depend on other rows.
        """
        self._is_partitioned = is_partitioned
        self._model = model
        self._strategy = strategy
        self._seed, self._seeds = seed, randomness.seed_states(model)
        # Batches are gathered one by one, since their rows differ: TensorFlow's collectives between processes need equal
        # shapes within one call of a compiled function.
        self._one = strategy.compiled(self._outputs_of_batch)

    def predict(self, examples: Examples, batch_size: int, most: int | None = None) -> Iterator[Any]:
        """Yields the outputs for each batch, in order: a structure of arrays [rows, ...]; the same on each process.

        Every process must read all of them.

        Args:
          examples: examples, in their natural order; targets and weights are ignored.
          batch_size: examples per batch, over all replicas.
          most: maximum number of examples.

        Raises:
          InputError: the outputs have no rows, the data does not fit the model, or the strategy needs equal shares, which
            the data cannot give.
        """
        size = examples.size if most is None else min(examples.size, most)
        divisor = self._strategy.replicas if self._strategy.compiles_replicas else 1
        batch_size = -(-batch_size // divisor) * divisor
        padded = -(-size // divisor) * divisor
        if padded > examples.size:
            examples = _padded(examples, divisor)

        def batches(replicas: Sequence[int], replica_count: int) -> tf.data.Dataset:
            return one_pass(examples, RowPartition(batch_size, tuple(replicas), replica_count, total=padded))

        iterator = self._strategy.distribute(batches)
        with must_fit(examples.element_spec[:1]):
            for number, first in enumerate(range(0, padded, batch_size)):
                # DTensor treats a small int64 as a compile-time constant, and recompiles the program whenever it changes.
                given = next(iterator), tf.constant(number, tf.uint64)
                self._strategy.trace_together(self._one, *given)
                outputs = self._one(*given)
                arrays = [self._on_host(value, min(padded - first, batch_size)) for value in tf.nest.flatten(outputs)]
                yield tf.nest.pack_sequence_as(outputs, [array[: size - first] for array in arrays])

    def _on_host(self, value: Any, rows: int) -> np.ndarray:
        found = keras.ops.convert_to_numpy(self._strategy.local(value)[0])
        if found.shape[0] != rows:
            raise InputError(
                f"Each output of a model must have a row for each example. Received: an output of shape {found.shape} for "
                f"{rows} examples. Call the model itself."
            )
        return found

    def _outputs_of_batch(self, batch: Any, number: tf.Tensor) -> Any:
        function = self._partitioned if self._is_partitioned else self._replica_function
        outputs = self._strategy.run(function, batch, number)
        return tf.nest.map_structure(lambda value: self._strategy.local(value)[0], outputs)

    def _partitioned(self, own_rows: ReplicaRows, number: tf.Tensor) -> Any:
        collectives = self._strategy.collectives
        structure: list[Any] = []

        def step(batch: Any) -> tuple[tuple[()], dict[str, tf.Tensor]]:
            structure[:] = [_checked(self._model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=False))]
            return (), {str(n): output for n, output in enumerate(tf.nest.flatten(structure[0]))}

        draws = self._seeds, self._seed, "predict", tf.cast(number, tf.int64)
        with randomness.not_training(*draws, collectives.rank, collectives.size):
            result = partitioned(self._model, [], step, own_rows, collectives)
        return tf.nest.pack_sequence_as(structure[0], list(result.values.values()))

    def _replica_function(self, own_rows: ReplicaRows, number: tf.Tensor) -> Any:
        strategy, collectives = self._strategy, counting(self._strategy.collectives, own_rows.rows)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(own_rows.batch)
        draws = randomness.not_training(
            self._seeds, self._seed, "predict", tf.cast(number, tf.int64), collectives.rank, collectives.size
        )
        with strategy.layouts.computing(self._model.trainable_variables), draws, using(collectives):
            outputs = _checked(strategy.layouts.by_rows(self._model(x, training=False)))
        return gathered(strategy.parts.outputs(outputs), collectives)


def _checked(outputs: Any) -> Any:
    for output in tf.nest.flatten(outputs):
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            found = "a scalar" if isinstance(output, tf.Tensor) else f"a {type(output).__name__}"
            raise InputError(
                "Predictions are concatenated by rows, so that each output must be a dense tensor of rows. Received: "
                f"{found}. Call the model itself."
            )
    return outputs


def concatenated(parts: Iterator[Any]) -> Any:
    """Returns structures of arrays as one, concatenated by rows."""
    return tf.nest.map_structure(lambda *rows: np.concatenate(rows), *parts)


def _padded(examples: Examples, divisor: int) -> Examples:
    if not isinstance(examples, Source):
        raise InputError(
            "The number of examples of a stream must be divisible by the number of replicas for this strategy. Received: "
            f"{examples.size} examples and {divisor} replicas. Leave some out, or give arrays."
        )
    return Padded(examples, divisor)
