"""Warnings about flags that were set but have no effect in a job."""

from typing import Any

import keras

from tfdist import keras_internals
from tfdist.config.effects import Job, without_effect
from tfdist.data import catalog
from tfdist.distribution.factory import declaration
from tfdist.distribution.strategy import Strategy
from tfdist.reporting.warn_once import warn_once


def warn_of_flags(config: Any, strategy: Strategy, model: keras.Model | None = None) -> None:
    """Logs a warning for each flag without effect, on the chief.

    Args:
      config: configuration with the name of the strategy instead of "auto".
      strategy: the strategy.
      model: the model; None if it is not known.
    """
    if not strategy.is_chief:
        return
    job = Job(
        replicas=strategy.replicas,
        processes=strategy.cluster.size,
        sums_gradients=strategy.sums_gradients,
        has_batch_norm=model is None
        or any(isinstance(layer, keras.layers.BatchNormalization) for layer in keras_internals.layers_of(model)),
        uses_data_dir=not hasattr(config, "dataset") or catalog.takes_data_dir(config.dataset),
    )
    for text in without_effect(config, job, declaration(config.strategy)):
        warn_once(text)
