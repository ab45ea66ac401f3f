"""Keras's own `predict`: each replica computes its rows, or all rows if outputs depend on other rows."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import using
from tfdist.config.job_config import RunConfig
from tfdist.data.batches import static_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.keras_fit.partitioned_step import communication, gathered_batch, log_partitioned
from tfdist.keras_fit.step_labels import output_dependence, per_row_state
from tfdist.row_semantics.explanation import Communication
from tfdist.step.metrics import KerasMetrics
from tfdist.step.prediction import BatchPrediction

Predict = Callable[[Any, Any], Any]  # (rows, structure of `tf.TensorSpec` of a batch) -> outputs


def make_predict(model: keras.Model, strategy: Strategy, options: RunConfig) -> Predict:
    """Returns a function that maps a `ReplicaRows`, in the form that `Strategy.run` accepts, to the outputs for all rows.

    Args:
      model: built model.
      strategy: strategy on which it runs.
      options: options of the run.
    """
    metrics = KerasMetrics(model).variables if model.compiled else []
    prediction = BatchPrediction(model, strategy, options.seed, model.predict_step, metrics)
    compiled: list[Callable[..., Any]] = []
    numbers = itertools.count()

    def predict(own_rows: Any, spec: Any) -> Any:
        if not compiled:
            compiled.append(_compiled(prediction, model, strategy, options.rows, spec))
        outputs = compiled[0](own_rows, tf.constant(next(numbers), tf.uint64), static_rows(spec))
        return tf.nest.map_structure(lambda value: strategy.local(value)[0], outputs)

    return predict


def _compiled(
    prediction: BatchPrediction, model: keras.Model, strategy: Strategy, rows: str, spec: Any
) -> Callable[..., Any]:
    """Returns a function (rows, number of the batch, static rows); warns if outputs for rows depend on other rows."""
    if strategy.replicas == 1:
        return prediction.compiled(prediction.from_own_rows)
    reason = per_row_state(model) or output_dependence(model, prediction.outputs, spec)
    if not reason:
        return prediction.compiled(prediction.from_own_rows)
    communicated = Communication(refused="its rows belong together" if per_row_state(model) else "")
    if not communicated.refused:
        communicated = communication(
            model, lambda batch: dict(enumerate(tf.nest.flatten(prediction.outputs(batch)))), spec
        )
    log_partitioned(model, "predict", reason, communicated, strategy, rows)
    if not communicated.refused:
        return prediction.compiled(prediction.partitioned)

    def from_gathered_batch(own_rows: ReplicaRows, number: tf.Tensor, static_rows: int | None) -> Any:
        batch, _, seed_replica, replica = gathered_batch(own_rows, strategy.collectives, static_rows)
        with using(replica.collectives), prediction.random_numbers(number, seed_replica):
            return prediction.outputs(batch)

    return prediction.compiled(from_gathered_batch)
