"""Keras's own `fit`, `evaluate` and `predict` on a strategy's replicas, including models with a custom `train_step`.

Keras's loop and callbacks stay; `distributed_model` replaces its data and its training function, and `patches` has the table of
all patched names. `step_labels` labels the rows of all steps, and so chooses how they run: models with Keras's own step use
`tfdist.step`, like a `Trainer`; `training_steps` also has the custom ones.
"""

from tfdist.keras_fit.distributed_model import DistributedModel
from tfdist.keras_fit.patches import PATCHED_NAMES, attach, attach_all, distribution_of

__all__ = ["PATCHED_NAMES", "DistributedModel", "attach", "attach_all", "distribution_of"]
