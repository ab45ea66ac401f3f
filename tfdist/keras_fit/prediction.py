"""Steps of Keras's own `predict`: each replica computes its rows, or all rows if outputs depend on other rows."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import using
from tfdist.collectives.gathering import gathered
from tfdist.data.batches import ReplicaRows, with_any_rows
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.keras_fit.first_batch import has_custom_code, state_of_rows
from tfdist.keras_fit.replica_batch import all_rows, warn_of_all_rows
from tfdist.keras_fit.replica_vs_full_batch import BothWays, NeedsAllRowsError, either_draws
from tfdist.step import randomness
from tfdist.step.any_rows import compiled_for_any_rows
from tfdist.step.tolerance import Tolerance

Predict = Callable[[Any], Any]
Drawing = Callable[[tf.Tensor | int], contextlib.AbstractContextManager[None]]  # (index of a replica) -> context


def predicting(model: keras.Model, strategy: HasCollectives, seed: int, check: bool) -> Predict:
    """Returns a function that maps a `ReplicaRows`, in the form that `Strategy.run` accepts, to the outputs for all rows.

    Args:
      model: built model.
      strategy: strategy on which it runs.
      seed: seed of the model's draws.
      check: whether to check on the first batch of several rows if the outputs for rows depend on other rows.
    """
    checks = check and strategy.replicas > 1 and has_custom_code(model)
    by_own_rows, by_all_rows = (
        _on_replicas(function, model, strategy, seed) for function in (_by_own_rows, _by_all_rows)
    )
    state = state_of_rows(model) if strategy.replicas > 1 else ""
    chosen: list[Predict] = [by_all_rows] if state else [] if checks else [by_own_rows]
    if state:
        warn_of_all_rows(model, "predict", state, strategy)

    def predict(own_rows: Any) -> Any:
        if chosen:
            return chosen[0](own_rows)
        if int(strategy.local(own_rows.batch_size)[0]) > 1:
            chosen.append(by_all_rows if _needs_all_rows(model, strategy, own_rows) else by_own_rows)
        return by_all_rows(own_rows) if not chosen else chosen[0](own_rows)

    return predict


def _on_replicas(function: Callable[..., Any], model: keras.Model, strategy: HasCollectives, seed: int) -> Predict:
    numbers, seeds = itertools.count(), randomness.seed_states(model)

    def drawing(number: tf.Tensor, replica: tf.Tensor | int) -> contextlib.AbstractContextManager[None]:
        return randomness.not_training(seeds, seed, "predict", tf.cast(number, tf.int64), replica, strategy.replicas)

    def predict(own_rows: Any, number: tf.Tensor) -> Any:
        outputs = strategy.run(
            functools.partial(function, model, strategy, functools.partial(drawing, number)), own_rows
        )
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    compiled = compiled_for_any_rows(strategy, predict)

    def called(own_rows: Any) -> Any:
        outputs = compiled(own_rows, tf.constant(next(numbers), tf.uint64))
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    return called


def _by_own_rows(model: keras.Model, strategy: HasCollectives, drawing: Drawing, own_rows: ReplicaRows) -> Any:
    with strategy.layouts.computing(model.trainable_variables), drawing(strategy.collectives.rank):
        outputs = _outputs(model, with_any_rows(own_rows).batch)
    return gathered(outputs, strategy.collectives)


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


def _by_all_rows(model: keras.Model, strategy: HasCollectives, drawing: Drawing, own_rows: ReplicaRows) -> Any:
    mine = all_rows(own_rows, strategy.collectives)
    with using(mine.collectives), drawing(mine.number):
        return _outputs(model, mine.batch)


def _needs_all_rows(model: keras.Model, strategy: HasCollectives, own_rows: Any) -> bool:
    """Returns whether outputs for a replica's rows differ from those for the same rows in the batch; warns if so."""
    try:
        either_draws(functools.partial(_compare, model, strategy, own_rows))
    except NeedsAllRowsError as error:
        warn_of_all_rows(model, "predict", str(error), strategy)
        return True
    return False


def _compare(model: keras.Model, strategy: HasCollectives, own_rows: Any, rows_differ: bool) -> None:
    both = BothWays(strategy, lambda batch, replica: _outputs(model, batch))
    ours, whole = both.run(own_rows, rows_differ)
    gathering = tf.function(
        lambda outputs: strategy.run(lambda mine: gathered(mine, strategy.collectives), outputs), autograph=False
    )
    both.agree(_difference(_arrays(both.first(gathering(ours))), _arrays(whole), Tolerance.of(model)))


def _arrays(outputs: Any) -> list[np.ndarray]:
    parts = tf.nest.flatten(outputs, expand_composites=True)
    return [np.asarray(tf.cast(part, tf.float64) if part.dtype.is_floating else part) for part in parts]


def _difference(ours: list[np.ndarray], theirs: list[np.ndarray], tolerance: Tolerance) -> str:
    """Describes what differs; empty if nothing does."""
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return f"outputs have the shape {list(a.shape)} instead of {list(b.shape)}"
        if not (tolerance.holds([a], [b]) if b.dtype.kind == "f" else np.array_equal(a, b)):
            return "the outputs differ"
    return ""
