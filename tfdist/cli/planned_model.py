"""The model and the optimizer for which `tfdist layout` prints a plan."""

from typing import Any

import keras

from tfdist import data, models
from tfdist.config.layout_config import LayoutConfig
from tfdist.layers.recompute import recompute
from tfdist.optimizers.catalog import average_weights, create_optimizer
from tfdist.planning.layout_plan import AbstractModel


def planned_model(config: LayoutConfig) -> AbstractModel:
    """Returns the model that the flags describe, without values for its variables; sets the precision."""
    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    data_set = data.load(config.dataset, config.data_dir)
    sizes: Any = data_set.input_shape, data_set.classes  # may be unknown for a user-defined model

    def make() -> Any:
        optimizer = create_optimizer(config.optimizer, config.learning_rate, config.momentum_correction)
        average_weights(optimizer, config.ema)
        return recompute(models.build(config.model, *sizes), config.recompute), optimizer

    return AbstractModel(make)
