"""Keras's own `fit`, `evaluate` and `predict` on a strategy's replicas, also with a `train_step` of the model's own.

`patches.py` is the one table of Keras's names that are replaced.
"""

from tfdist.keras_fit.distributed import Distributed
from tfdist.keras_fit.patches import REPLACED, attach, attach_all, attached

__all__ = ["REPLACED", "Distributed", "attach", "attach_all", "attached"]
