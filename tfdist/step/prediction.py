"""Prediction: each replica computes its rows, and every process receives all outputs in row order."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import using
from tfdist.collectives.rows import gather_structure, mask_if_empty
from tfdist.data import Examples, Source
from tfdist.data.batches import single_pass
from tfdist.data.inputs import PaddedSource
from tfdist.data.row_partition import ReplicaRows, RowPartition
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.step import randomness
from tfdist.step.data_check import explain_mismatch
from tfdist.step.partitioned_step import Division, all_rows_step


class BatchPrediction:
    """The replica functions that compute a model's outputs for all rows of a batch."""

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        seed: int,
        compute_outputs: Callable[[Any], Any],
        metrics: Sequence[keras.Variable] = (),
    ):
        """Initializes the functions; `metrics` are variables of metrics that `compute_outputs` may update."""
        self._model, self._strategy, self._compute_outputs, self._metrics = model, strategy, compute_outputs, metrics
        self._seed, self._seeds = seed, randomness.seed_states(model)

    def compile(self, division: Division) -> Callable[..., Any]:
        """Returns a compiled function of per-replica rows, the batch number, and the static number of rows.

        `division` is not "own" if the outputs for a row may depend on other rows.
        """
        function = self._predict_rows if division == "own" else functools.partial(self._predict_together, division)

        def predict(own_rows: Any, number: tf.Tensor, static_rows: int | None = None) -> Any:
            outputs = self._strategy.run(functools.partial(function, static_rows=static_rows), own_rows, number)
            return tf.nest.map_structure(lambda value: self._strategy.local(value)[0], outputs)

        return self._strategy.compiled(predict)

    def _predict_rows(self, own_rows: ReplicaRows, number: tf.Tensor, static_rows: int | None) -> Any:
        """Computes the outputs for this replica's rows, and gathers those of all replicas."""
        layouts, collectives = self._strategy.layouts, mask_if_empty(self._strategy.collectives, own_rows.rows)
        random_numbers = self._random_numbers(number, collectives.rank)
        with layouts.compute_layouts(self._model.trainable_variables), random_numbers, using(collectives):
            outputs = layouts.lay_out_rows(self.outputs(own_rows.batch))
        return gather_structure(self._strategy.parts.outputs(outputs), collectives)

    def _predict_together(
        self, division: Division, own_rows: ReplicaRows, number: tf.Tensor, static_rows: int | None
    ) -> Any:
        """Computes the outputs of one device, for a model whose outputs for a row may depend on other rows."""
        collectives = self._strategy.collectives
        structure: list[Any] = []

        def step(batch: Any) -> tuple[tuple[()], dict[str, tf.Tensor]]:
            structure[:] = [self.outputs(batch)]
            return (), {str(n): output for n, output in enumerate(tf.nest.flatten(structure[0]))}

        numbers = self._random_numbers(number, collectives.rank if division == "partitioned" else 0)
        with self._strategy.layouts.compute_layouts(self._model.trainable_variables), numbers:
            arguments = self._model, self._metrics, step, own_rows, collectives, static_rows
            result = all_rows_step(division, *arguments)
        result.assign()
        return tf.nest.pack_sequence_as(structure[0], list(result.values.values()))

    def outputs(self, batch: Any) -> Any:
        """Returns the outputs for a batch.

        Raises:
          InputError: an output is not a dense tensor of rows.
        """
        outputs = self._compute_outputs(batch)
        for output in tf.nest.flatten(outputs):
            if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
                received = "a scalar" if isinstance(output, tf.Tensor) else f"a {type(output).__name__}"
                raise InputError(
                    "Predictions are concatenated by rows, so each output must be a dense tensor of rows. Received: "
                    f"{received}. Call the model itself."
                )
        return outputs

    def _random_numbers(self, number: tf.Tensor, replica: tf.Tensor | int) -> contextlib.AbstractContextManager[None]:
        number = tf.cast(number, tf.int64)
        return randomness.inference_draws(
            self._seeds, self._seed, "predict", number, replica, self._strategy.collectives.size
        )


class Predictor:
    """Predicts with one model; caches compiled functions.

    Cost: one all-gather of a batch's outputs, which must fit into the memory of each process.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, seed: int, division: Division = "own"):
        """Initializes the predictor; `division` is not "own" if outputs for a row may depend on other rows."""
        self._strategy, self._division = strategy, division
        prediction = BatchPrediction(
            model, strategy, seed, lambda batch: model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=False)
        )
        # Batches are gathered one by one: their rows differ, and TensorFlow's collectives between processes need equal shapes
        # within one call of a compiled function.
        self._predict = prediction.compile(division)

    def predict(self, examples: Examples, batch_size: int, limit: int | None = None) -> Iterator[Any]:
        """Yields the outputs for each batch, in order: a structure of arrays [rows, ...]; the same on each process.

        Every process must read all of them.

        Args:
          examples: examples, in their natural order; targets and weights are ignored.
          batch_size: examples per batch, over all replicas.
          limit: maximum number of examples.

        Raises:
          InputError: the outputs have no rows, the data does not fit the model, or the strategy needs equal shares, which
            the data cannot give.
        """
        size = examples.size if limit is None else min(examples.size, limit)
        divisor = self._strategy.replicas if self._strategy.compiles_replicas else 1
        batch_size = -(-batch_size // divisor) * divisor
        padded_size = -(-size // divisor) * divisor
        if padded_size > examples.size:
            examples = _pad(examples, divisor)

        def batches(replicas: Sequence[int], replica_count: int) -> tf.data.Dataset:
            return single_pass(examples, RowPartition(batch_size, tuple(replicas), replica_count, total=padded_size))

        iterator = self._strategy.distribute(batches)
        with explain_mismatch(examples.element_spec[:1]):
            for number, start in enumerate(range(0, padded_size, batch_size)):
                # DTensor treats a small int64 as a compile-time constant, and recompiles the program whenever it changes.
                rows = min(padded_size - start, batch_size)
                static_rows = rows if self._division == "whole" else None
                arguments = next(iterator), tf.constant(number, tf.uint64), static_rows
                self._strategy.trace_together(self._predict, *arguments)
                outputs = self._predict(*arguments)
                arrays = [self._to_host(value, rows) for value in tf.nest.flatten(outputs)]
                yield tf.nest.pack_sequence_as(outputs, [array[: size - start] for array in arrays])

    def _to_host(self, value: Any, rows: int) -> np.ndarray:
        array = keras.ops.convert_to_numpy(self._strategy.local(value)[0])
        if array.shape[0] != rows:
            raise InputError(
                f"Each output of a model must have a row for each example. Received: an output of shape {array.shape} for "
                f"{rows} examples. Call the model itself."
            )
        return array


def concatenate_rows(parts: Iterator[Any]) -> Any:
    """Concatenates structures of arrays by rows."""
    return tf.nest.map_structure(lambda *rows: np.concatenate(rows), *parts)


def _pad(examples: Examples, divisor: int) -> Examples:
    if not isinstance(examples, Source):
        raise InputError(
            "The number of examples of a stream must be divisible by the number of replicas for this strategy. Received: "
            f"{examples.size} examples and {divisor} replicas. Leave some out, or give arrays."
        )
    return PaddedSource(examples, divisor)
