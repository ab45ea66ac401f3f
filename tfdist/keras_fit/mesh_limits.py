"""Checks of the strategy, options and models with which Keras's methods are called; a mesh does not support all."""

import keras

from tfdist import keras_internals
from tfdist.config.run_config import RunConfig
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.step.validation import check_engine_sums

_STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics")


def suitable(strategy: Strategy, options: RunConfig) -> Strategy:
    """Returns the strategy.

    Raises:
      InputError: Keras's methods do not run on it, or not with these options.
    """
    if not strategy.trains_whole_model:
        raise InputError(
            f"Keras's own fit needs the whole model in each process. Received: {strategy.name}, whose processes have stages. "
            "Use tfdist.Trainer there."
        )
    # Replicas have different numbers of rows; on a mesh, the only replica has all rows.
    if strategy.compiles_replicas and not strategy.sums_gradients:
        raise InputError(
            "Keras's own fit needs a strategy whose replicas accept any number of rows. Received: "
            f"{strategy.name}. Use tfdist.Trainer there."
        )
    check_engine_sums(strategy, options.jit_compile, options.compression)
    return strategy


def check_steps(model: keras.Model, strategy: Strategy) -> None:
    """Raises `InputError` for a custom step on a mesh: where it computes losses and gradients, nothing is laid out."""
    own = [name for name in _STEPS if keras_internals.overridden(model, name)]
    if strategy.sums_gradients and own:
        raise InputError(
            f"On a mesh, models are trained and evaluated by Keras's own steps. Received: {type(model).__name__}, which "
            f"overrides {own[0]}. Use compile(loss=..., metrics=...) and add_loss, or another strategy."
        )


def check_not_eager(strategy: Strategy) -> None:
    """Raises `InputError` for a call with `run_eagerly=True` on a mesh."""
    if strategy.sums_gradients:
        raise InputError(
            "On a mesh, every step is compiled. Received: run_eagerly=True. Leave it out, or debug with another strategy."
        )
