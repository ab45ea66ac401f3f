"""Exact evaluation and prediction: the same results as on one device, for any number of examples and replicas."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import collectives_scope
from tfdist.collectives.rows import gather_structure, mask_if_empty
from tfdist.data import EvaluationPipeline, Examples, Source, check_batch_size
from tfdist.data.batches import count_rows, single_pass
from tfdist.data.inputs import PaddedSource
from tfdist.data.row_partition import ReplicaRows, RowPartition
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum
from tfdist.step import loss, randomness
from tfdist.step.data_check import explain_mismatch
from tfdist.step.layer_state import assign, restore_unless, select
from tfdist.step.metrics import ModelMetrics, weight_scalars
from tfdist.step.partitioned_step import Division, all_rows_step


class Evaluator:
    """Evaluates one model; caches compiled functions."""

    def __init__(
        self, model: keras.Model, strategy: Strategy, seed: int, metrics: ModelMetrics, read_sums: Callable[[], Any]
    ):
        """Initializes the evaluator; `read_sums` is the result of `compile_read_and_reset`."""
        self._model, self._strategy, self._metrics, self._read_sums = model, strategy, metrics, read_sums
        self._seed, self._seeds = seed, randomness.seed_states(model)
        if strategy.compiles_loops:
            self._run = tf.function(self._sum_on_device, autograph=False, reduce_retracing=True)
        else:
            self._evaluate_batch = strategy.compiled(lambda *arguments: strategy.run(self._batch_sums, *arguments))
            self._run = self._loop_on_host

    def evaluate(self, data: Any, batch_size: int) -> dict[str, float]:
        """Returns the loss and the metrics over a whole dataset, a source, as if it were one batch.

        Only a loss with `reduction="sum"` depends on `batch_size`, the examples per batch over all replicas. Raises
        `InputError` if the strategy needs the same number of examples on each replica, and this is not possible.
        """
        # Replicas must have equal numbers of examples: metrics that ignore weights would count padding.
        if self._strategy.compiles_replicas:
            check_batch_size(batch_size, self._strategy.replicas, equal=True)
            if data.size % self._strategy.replicas:
                raise InputError(
                    "With this strategy, the number of examples to evaluate must be divisible by the number of replicas. "
                    f"Received: {data.size} examples and {self._strategy.replicas} replicas. Drop the remaining examples."
                )
        pipeline = EvaluationPipeline(data, batch_size)
        iterator = self._strategy.distribute(pipeline.dataset)
        is_short = data.size % batch_size > 0
        static_rows = batch_size if self._metrics.division == "whole" and not is_short else None
        sums = self._sum_batches(iterator, pipeline.steps, is_short, static_rows)
        metric_sums, regularization = self._read_sums(), self._strategy.parts.regularization(self._model)
        results = {"loss": loss.evaluation_loss(self._model, sums, regularization)}
        results |= self._metrics.results(metric_sums) if metric_sums else {}
        names = [mean.name for mean in self._metrics.losses]
        return results | dict(zip(names, loss.evaluation_losses(sums) if names else (), strict=True))

    def _sum_batches(self, iterator: Any, steps: int, is_short: bool, static_rows: int | None) -> np.ndarray:
        """Returns the sums over all batches.

        If `is_short`, the last batch is smaller and gets a separate call: a layer may gather rows, and TensorFlow's
        collectives between processes need equal shapes within one call of a compiled function.
        """
        full_batches = steps - is_short
        sums = []
        for start, end in ((0, full_batches), (full_batches, steps)):
            if start < end:
                arguments = iterator, tf.constant(start), tf.constant(end), static_rows
                self._strategy.trace_together(self._run, *arguments)
                sums.append(np.asarray(self._run(*arguments)))
        return np.sum(sums, axis=0)

    def _loop_on_host(self, iterator: Any, start: tf.Tensor, end: tf.Tensor, static_rows: int | None) -> tf.Tensor:
        batch_indices = [tf.constant(batch_index, tf.int64) for batch_index in range(int(start), int(end))]
        results = [self._evaluate_batch(next(iterator), batch_index) for batch_index in batch_indices]
        return tf.add_n([self._strategy.local(sums)[0] for sums in results])

    def _sum_on_device(self, iterator: Any, start: tf.Tensor, end: tf.Tensor, static_rows: int | None) -> tf.Tensor:
        length = 2 * (len(keras_internals.flat_losses(self._model)) + 1)
        batch_sums = functools.partial(self._batch_sums, static_rows=static_rows)

        def body(index: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            replica_sums = self._strategy.run(batch_sums, next(iterator), tf.cast(index, tf.int64))
            return index + 1, sums + tf.add_n(self._strategy.local(replica_sums))

        initial = (start, tf.zeros([length], tf.float64))
        _, local_sums = tf.while_loop(lambda index, _: index < end, body, initial, parallel_iterations=1)

        def merge(sums: tf.Tensor) -> tf.Tensor:
            return Bucketed(Sum()).reduce([sums], [], self._strategy.job_collectives, name="evaluation").totals[0]

        totals = self._strategy.run(merge, local_sums / len(self._strategy.local_replicas))
        return self._strategy.local(totals)[0]

    def _batch_sums(self, own_rows: ReplicaRows, batch_index: tf.Tensor, static_rows: int | None = None) -> tf.Tensor:
        if self._metrics.replicas_see_all_rows:
            return self._share_of_sums(own_rows, batch_index, static_rows)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(own_rows.batch)
        rows, previous_values = own_rows.rows, [tf.identity(variable) for variable in self._metrics.variables]
        collectives = mask_if_empty(self._strategy.collectives, rows)
        random_scope = self._random_scope(batch_index, collectives.rank)
        # A scalar loss or metric is weighted by this replica's number of rows: all rows of the global batch have equal weight.
        with collectives_scope(collectives), weight_scalars(loss.to_floatx(rows)):
            with self._strategy.layouts.compute_layouts(self._model.trainable_variables), random_scope:
                outputs = self._strategy.layouts.lay_out_rows(self._model(x, training=False))
                parts = loss.terms(self._model, y, outputs, weight)
                sums = loss.evaluation_sums(self._model, parts, rows, own_rows.batch_size)
            keras_internals.update_metrics(self._model, y, outputs, weight)
        if collectives.size > 1:
            [sums] = select(rows > 0, [sums], [tf.zeros_like(sums)])
            restore_unless(rows > 0, self._metrics.variables, previous_values)
        if not self._strategy.parts.computes_outputs:
            sums = loss.layer_loss_sums(sums)
            assign(self._metrics.variables, previous_values)
        return sums

    def _share_of_sums(self, own_rows: ReplicaRows, batch_index: tf.Tensor, static_rows: int | None) -> tf.Tensor:
        """Returns this replica's share of the sums that a single device would compute from all rows of a batch."""
        collectives, division = self._strategy.collectives, self._metrics.division

        def step(batch: Any) -> tuple[tuple[()], dict[str, tf.Tensor]]:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            outputs, rows = self._model(x, training=False), count_rows(batch)
            sums = loss.evaluation_sums(self._model, loss.terms(self._model, y, outputs, weight), rows, rows)
            keras_internals.update_metrics(self._model, y, outputs, weight)
            return (), {"sums": sums}

        with self._random_scope(batch_index, collectives.rank if division == "partitioned" else 0):
            arguments = self._model, self._metrics.variables, step, own_rows, collectives, static_rows
            result = all_rows_step(division, *arguments)
        result.assign()
        return result.values["sums"] / collectives.size

    def _random_scope(self, batch: tf.Tensor, replica: tf.Tensor | int) -> contextlib.AbstractContextManager[None]:
        size = self._strategy.collectives.size
        return randomness.inference_random_scope(self._seeds, self._seed, batch, replica, size, "evaluate")


def compile_prediction(
    model: keras.Model,
    strategy: Strategy,
    seed: int,
    compute_outputs: Callable[[Any], Any],
    division: Division,
    metrics: Sequence[keras.Variable] = (),
) -> Callable[..., Any]:
    """Returns a compiled function (per-replica rows, batch index, static number of rows) -> outputs for all rows.

    `compute_outputs` returns the outputs for a batch, and may update variables of `metrics`. `division` says which rows each
    replica computes: its "own", or "partitioned" or "whole" if the output for a row may depend on other rows.
    """
    seeds = randomness.seed_states(model)

    def outputs_of_batch(own_rows: ReplicaRows, batch_index: tf.Tensor, static_rows: int | None) -> Any:
        """Computes this replica's outputs and gathers those of all replicas, or computes all outputs as on one device."""
        collectives = mask_if_empty(strategy.collectives, own_rows.rows)
        replica, batch_index = 0 if division == "whole" else collectives.rank, tf.cast(batch_index, tf.int64)
        random_scope = randomness.inference_random_scope(seeds, seed, batch_index, replica, collectives.size, "predict")
        structure: list[Any] = []

        def step(batch: Any) -> tuple[tuple[()], dict[str, tf.Tensor]]:
            structure[:] = [compute_outputs(batch)]
            return (), {str(n): output for n, output in enumerate(tf.nest.flatten(structure[0]))}

        with strategy.layouts.compute_layouts(model.trainable_variables), random_scope:
            if division == "own":
                with collectives_scope(collectives):
                    outputs = strategy.layouts.lay_out_rows(compute_outputs(own_rows.batch))
                return gather_structure(strategy.parts.outputs(outputs), collectives)
            result = all_rows_step(division, model, metrics, step, own_rows, strategy.collectives, static_rows)
        result.assign()
        return tf.nest.pack_sequence_as(structure[0], list(result.values.values()))

    def predict(own_rows: Any, batch_index: tf.Tensor, static_rows: int | None) -> Any:
        outputs = strategy.run(functools.partial(outputs_of_batch, static_rows=static_rows), own_rows, batch_index)
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    return strategy.compiled(predict)


def check_outputs(outputs: Any) -> Any:
    """Returns the outputs for a batch; raises `InputError` if one is not a dense tensor with a batch axis."""
    for output in tf.nest.flatten(outputs):
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            received = "a scalar" if isinstance(output, tf.Tensor) else f"a {type(output).__name__}"
            raise InputError(
                "Predictions are concatenated along the batch axis, so each output must be a dense tensor whose first axis is "
                f"the batch axis. Received: {received}. Call the model directly: model(x)."
            )
    return outputs


class Predictor:
    """Predicts with one model; caches compiled functions.

    Cost: one all-gather of a batch's outputs, which must fit into the memory of each process.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, seed: int, division: Division):
        """Initializes the predictor; see `compile_prediction` for `division`."""
        self._strategy, self._division = strategy, division

        def outputs(batch: Any) -> Any:
            return check_outputs(model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=False))

        # Batches are gathered one by one: their rows differ, and TensorFlow's collectives between processes need equal shapes
        # within one call of a compiled function.
        self._predict = compile_prediction(model, strategy, seed, outputs, division)

    def predict(self, examples: Examples, batch_size: int, limit: int | None = None) -> Iterator[Any]:
        """Yields the outputs for each batch, in order: a structure of arrays [rows, ...]; the same on each process.

        Every process must consume the whole iterator. At most `limit` examples are used, in their natural order and
        `batch_size` at a time over all replicas; targets and weights are ignored. Raises `InputError` if an output has no
        batch axis, the data does not fit the model, or the examples of a stream cannot be divided as the strategy needs.
        """
        size = examples.size if limit is None else min(examples.size, limit)
        divisor = self._strategy.replicas if self._strategy.compiles_replicas else 1
        batch_size = -(-batch_size // divisor) * divisor
        padded_size = -(-size // divisor) * divisor
        if padded_size > examples.size:
            if not isinstance(examples, Source):
                raise InputError(
                    "With this strategy, the number of examples of a stream must be divisible by the number of replicas. "
                    f"Received: {examples.size} examples and {divisor} replicas. Drop the remaining examples, or pass arrays."
                )
            examples = PaddedSource(examples, divisor)

        def batches(replicas: Sequence[int], replica_count: int) -> tf.data.Dataset:
            return single_pass(examples, RowPartition(batch_size, tuple(replicas), replica_count, total=padded_size))

        iterator = self._strategy.distribute(batches)
        with explain_mismatch(examples.element_spec[:1]):
            for batch_index, start in enumerate(range(0, padded_size, batch_size)):
                # DTensor treats a small int64 as a compile-time constant, and recompiles the program whenever it changes.
                rows = min(padded_size - start, batch_size)
                static_rows = rows if self._division == "whole" else None
                arguments = next(iterator), tf.constant(batch_index, tf.uint64), static_rows
                self._strategy.trace_together(self._predict, *arguments)
                outputs = self._predict(*arguments)
                arrays = [self._to_host(value, rows) for value in tf.nest.flatten(outputs)]
                yield tf.nest.pack_sequence_as(outputs, [array[: size - start] for array in arrays])

    def _to_host(self, value: Any, rows: int) -> np.ndarray:
        array = keras.ops.convert_to_numpy(self._strategy.local(value)[0])
        if array.shape[0] != rows:
            raise InputError(
                f"Each output of a model must have a row for each example. Received: an output of shape {array.shape} for "
                f"{rows} examples. Call the model directly: model(x)."
            )
        return array


def concatenate_rows(parts: Iterator[Any]) -> Any:
    """Concatenates structures of arrays along the first axis."""
    return tf.nest.map_structure(lambda *rows: np.concatenate(rows), *parts)
