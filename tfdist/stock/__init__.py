"""Keras's own `fit`, `evaluate` and `predict` on a strategy's replicas."""

from tfdist.stock.distributed import OWN_FLAGS, Distributed
from tfdist.stock.replaced import REPLACED, attach, attach_all, attached

__all__ = ["OWN_FLAGS", "REPLACED", "Distributed", "attach", "attach_all", "attached"]
