"""Prediction: each replica computes its rows, and every process gets all outputs in the order of the rows."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.batches import Dealt, count_rows, with_any_rows
from tfdist.engine_errors import one_line
from tfdist.errors import InputError
from tfdist.stock.first_batch import has_own_code
from tfdist.stock.gathering import gathered
from tfdist.stock.replica_batch import all_rows, fewer_rows, warn_of_all_rows
from tfdist.stock.tolerance import Tolerance
from tfdist.strategy import HasCollectives

Predict = Callable[[Any], Any]


def predicting(model: keras.Model, strategy: HasCollectives, check: bool) -> Predict:
    """Returns a function from what `Strategy.run` takes for a `Dealt` to the outputs for all rows of the global batch.

    Args:
      model: built.
      strategy: where it runs.
      check: whether the first batch shows if outputs for some rows depend on the others.
    """
    chosen: list[Predict] = []

    def predict(dealt: Any) -> Any:
        if not chosen:
            checked = check and strategy.replicas > 1 and has_own_code(model)
            needs_all = checked and _needs_all_rows(model, strategy, dealt)
            chosen.append(_on_replicas(_by_all_rows if needs_all else _by_own_rows, model, strategy))
        return chosen[0](dealt)

    return predict


def _on_replicas(function: Callable[..., Any], *given: Any) -> Predict:
    strategy = given[-1]

    @tf.function(autograph=False, reduce_retracing=True)
    def predict(dealt: Any) -> Any:
        outputs = strategy.run(functools.partial(function, *given), dealt)
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    return predict


def _by_own_rows(model: keras.Model, strategy: HasCollectives, dealt: Dealt) -> Any:
    outputs = model.predict_step(with_any_rows(dealt).batch)
    for output in tf.nest.flatten(outputs):
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            raise InputError(
                "Predictions of replicas are put together by rows, so each output is a dense tensor of rows. Received: "
                f"{'a scalar' if isinstance(output, tf.Tensor) else type(output).__name__}. Call the model itself."
            )
    return gathered(outputs, strategy.collectives)


def _by_all_rows(model: keras.Model, strategy: HasCollectives, dealt: Dealt) -> Any:
    return model.predict_step(all_rows(dealt, strategy.collectives).batch)


def _needs_all_rows(model: keras.Model, strategy: HasCollectives, dealt: Any) -> bool:
    """Whether outputs for a replica's rows differ from those for the same rows among all; warns if they do."""
    found = ""
    for rows_differ in (True, False):  # see `FirstBatch.laws`
        found = _difference(_on_replicas(_both_ways, rows_differ, model, strategy), dealt, Tolerance.of(model))
        if not found:
            return False
    warn_of_all_rows(model, "predict", found, strategy)
    return True


def _difference(both_ways: Predict, dealt: Any, tolerance: Tolerance) -> str:
    """What differs; empty if nothing does."""
    try:
        pairs = [[np.asarray(value) for value in pair] for pair in both_ways(dealt)]
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        return one_line(str(error))
    for ours, theirs in pairs:
        if ours.shape != theirs.shape:
            return f"outputs would have the shape {list(ours.shape)} and not {list(theirs.shape)}"
        numbers = np.issubdtype(theirs.dtype, np.number)
        if not (tolerance.holds([ours], [theirs]) if numbers else np.array_equal(ours, theirs)):
            return "outputs would be other ones"
    return ""


def _both_ways(rows_differ: bool, model: keras.Model, strategy: HasCollectives, dealt: Dealt) -> Any:
    """Pairs of outputs for some rows without chance: computed by all replicas together, and by one."""
    collectives = strategy.collectives
    mine = fewer_rows(dealt, collectives.size)
    [everyones] = collectives.all_gather([count_rows(mine)[None]], name="first_batch/rows")
    with keras_internals.neutral(tf.reduce_sum(everyones[: collectives.rank]) if rows_differ else None):
        ours = gathered(model.predict_step(mine), collectives)
    whole_batch = gathered(mine, collectives)
    with keras_internals.neutral(0 if rows_differ else None):
        whole = model.predict_step(whole_batch)
    values = (tf.nest.flatten(outputs, expand_composites=True) for outputs in (ours, whole))
    return list(zip(*values, strict=True))
