"""Steps of Keras's own `predict`: each replica computes its rows, or all rows if outputs depend on other rows."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import using
from tfdist.collectives.counted_rows import counting
from tfdist.collectives.gathering import gathered
from tfdist.config.run_config import RunConfig
from tfdist.data.replica_rows import ReplicaRows
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.keras_fit.partitioned_step import communication, partitioned, say_partitioned
from tfdist.keras_fit.replica_batch import all_rows
from tfdist.keras_fit.step_labels import not_of_rows, state_of_rows
from tfdist.row_semantics.explanation import Communication
from tfdist.step import randomness

Predict = Callable[[Any, int | None], Any]  # (rows, number of rows of a batch if TensorFlow knows it) -> outputs
Drawing = Callable[[tf.Tensor | int], contextlib.AbstractContextManager[None]]  # (index of a replica) -> context


def predicting(model: keras.Model, strategy: HasCollectives, options: RunConfig) -> Predict:
    """Returns a function that maps a `ReplicaRows`, in the form that `Strategy.run` accepts, to the outputs for all rows.

    Args:
      model: built model.
      strategy: strategy on which it runs.
      options: options of the run.
    """
    chosen: list[Predict] = []

    def predict(own_rows: Any, static_rows: int | None) -> Any:
        if not chosen:
            function = _function(model, strategy, own_rows, options.rows, static_rows)
            chosen.append(_on_replicas(function, model, strategy, options.seed))
        return chosen[0](own_rows, static_rows)

    return predict


def _function(
    model: keras.Model, strategy: HasCollectives, own_rows: Any, rows: str, static_rows: int | None
) -> Callable[..., Any]:
    """Returns the function of replicas; warns if outputs for rows depend on other rows."""
    if strategy.replicas == 1:
        return _by_own_rows
    spec = tf.nest.map_structure(
        lambda leaf: None if leaf is None else _spec(strategy.local(leaf)[0], static_rows), own_rows.batch
    )
    reason = state_of_rows(model) or not_of_rows(model, lambda batch: _outputs(model, batch), spec)
    if not reason:
        return _by_own_rows
    sent = Communication(refused="its rows belong together" if state_of_rows(model) else "")
    if not sent.refused:
        sent = communication(model, functools.partial(_outputs_by_name, model, []), spec)
    say_partitioned(model, "predict", reason, sent, strategy, rows)
    return _by_all_rows if sent.refused else _by_partition


def _spec(leaf: Any, static_rows: int | None) -> Any:
    return (
        tf.TensorSpec([static_rows, *leaf.shape[1:]], leaf.dtype)
        if isinstance(leaf, tf.Tensor)
        else tf.type_spec_from_value(leaf)
    )


def _on_replicas(function: Callable[..., Any], model: keras.Model, strategy: HasCollectives, seed: int) -> Predict:
    numbers, seeds = itertools.count(), randomness.seed_states(model)

    def drawing(number: tf.Tensor, replica: tf.Tensor | int) -> contextlib.AbstractContextManager[None]:
        return randomness.not_training(seeds, seed, "predict", tf.cast(number, tf.int64), replica, strategy.replicas)

    def predict(own_rows: Any, number: tf.Tensor, static_rows: int | None) -> Any:
        given = {"static_rows": static_rows} if function is _by_all_rows else {}
        outputs = strategy.run(
            functools.partial(function, model, strategy, functools.partial(drawing, number), **given), own_rows
        )
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    compiled = strategy.compiled(predict)

    def called(own_rows: Any, static_rows: int | None) -> Any:
        outputs = compiled(own_rows, tf.constant(next(numbers), tf.uint64), static_rows)
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    return called


def _by_own_rows(model: keras.Model, strategy: HasCollectives, drawing: Drawing, own_rows: ReplicaRows) -> Any:
    collectives = counting(strategy.collectives, own_rows.rows)
    with strategy.layouts.computing(model.trainable_variables), drawing(collectives.rank), using(collectives):
        return gathered(_outputs(model, own_rows.batch), collectives)


def _outputs(model: keras.Model, batch: Any) -> Any:
    outputs = model.predict_step(batch)
    for output in tf.nest.flatten(outputs):
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            raise InputError(
                "Predictions of replicas are concatenated by rows, so each output must be a dense tensor of rows. "
                f"Received: {'a scalar' if isinstance(output, tf.Tensor) else type(output).__name__}. Call the model "
                "itself."
            )
    return outputs


def _by_partition(model: keras.Model, strategy: HasCollectives, drawing: Drawing, own_rows: ReplicaRows) -> Any:
    collectives = strategy.collectives
    structure: list[Any] = []
    with strategy.layouts.computing(model.trainable_variables), drawing(collectives.rank):
        result, _ = partitioned(model, functools.partial(_outputs_by_name, model, structure), own_rows, collectives)
    result.assign()
    return tf.nest.pack_sequence_as(structure[0], list(result.values.values()))


def _outputs_by_name(model: keras.Model, structure: list[Any], batch: Any) -> dict[str, tf.Tensor]:
    """Returns the outputs by their numbers, and adds their structure to `structure`."""
    outputs = _outputs(model, batch)
    structure.append(outputs)
    return {str(number): output for number, output in enumerate(tf.nest.flatten(outputs))}


def _by_all_rows(
    model: keras.Model, strategy: HasCollectives, drawing: Drawing, own_rows: ReplicaRows, static_rows: int | None
) -> Any:
    mine = all_rows(own_rows, strategy.collectives, static_rows)
    with using(mine.collectives), drawing(mine.number):
        return _outputs(model, mine.batch)
