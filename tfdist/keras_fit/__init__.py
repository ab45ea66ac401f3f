"""Keras's own `fit`, `evaluate` and `predict` on a strategy's replicas, including models with a custom `train_step`.

`patches.py` has the table of all patched names of Keras. `step_labels` decides how the values of replicas are combined. A
model with Keras's own step is trained by `tfdist.step`, as by a `Trainer`; one with a step of its own by `custom_train_step`.
"""

from tfdist.keras_fit.distributed_model import Distributed
from tfdist.keras_fit.patches import REPLACED, attach, attach_all, attached

__all__ = ["REPLACED", "Distributed", "attach", "attach_all", "attached"]
