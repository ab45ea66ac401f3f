"""Compiles the model of a trainer, with an optimizer that leaves to the step what the step does."""

import dataclasses
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.config.pipeline_options import check_without_flush
from tfdist.distribution.strategy import Strategy
from tfdist.optimizers.weight_average import average_weights
from tfdist.pipelining.staged_model import whole_model
from tfdist.pipelining.staleness import without_flush_of
from tfdist.step.settings import Settings
from tfdist.step.validation import (
    check_created_in_scope,
    check_not_wrapped,
    check_optimizer,
    check_own_gradients,
    default_loss_scale,
    without_loss_scale,
)
from tfdist.synchronization.federated import check_options


def compile_model(
    model: keras.Model,
    strategy: Strategy,
    optimizer: keras.Optimizer | str,
    settings: Settings,
    ema: float,
    **compiled: Any,
) -> Settings:
    """Compiles a model; for the arguments see also `Trainer`.

    Args:
      model: Keras model, created under the strategy's scope.
      strategy: the strategy.
      optimizer: Keras optimizer.
      settings: options of the step.
      ema: momentum of the average of the weights.
      **compiled: further arguments of `keras.Model.compile`, including the lists of metrics.

    Returns:
      The options of the step, with the loss scaling of a `LossScaleOptimizer`, or the model's default, if none is given.

    Raises:
      InputError: an argument is invalid.
    """
    check_created_in_scope(strategy, "model", model.variables)
    if isinstance(optimizer, keras.Optimizer):
        check_created_in_scope(strategy, "optimizer", optimizer.variables)
    optimizer, taken = without_loss_scale(keras.optimizers.get(optimizer))
    check_not_wrapped(optimizer)
    check_optimizer(optimizer, settings.clip)
    average_weights(optimizer, ema)
    given = {name: compiled.pop(name) or None for name in ("metrics", "weighted_metrics")}
    metrics = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    model.compile(optimizer=optimizer, jit_compile=False, auto_scale_loss=False, **metrics, **compiled)
    if not strategy.trains_whole_model:
        check_own_gradients(optimizer)
    loss_scale = settings.loss_scale or taken or default_loss_scale(whole_model(model))
    found = dataclasses.replace(settings, loss_scale=loss_scale)
    check_options(found, optimizer)
    if pipeline := without_flush_of(strategy):
        check_without_flush(
            pipeline.schedule.name,
            clip_norm=found.clip.norm,
            loss_scale=str(found.loss_scale or ""),
            shared=next((variable.path for variable, _ in model.cut.shared), ""),
        )
    return found


def takes_one_hot(model: keras.Model) -> bool | None:
    """Returns whether a compiled model's loss takes vectors of classes rather than class numbers; None if unknown."""
    forms = [keras_internals.loss_form(loss)[0] for loss in keras_internals.user_losses(model)]
    names = {form.replace("_", "").lower() for form in forms}  # of a function, or of a class
    if len(names) != 1 or "" in names:
        return None
    return names != {"sparsecategoricalcrossentropy"}
