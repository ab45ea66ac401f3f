"""Optimizers and learning rates for large batches, and a catalog that creates them and Keras's optimizers by name.

Gradient reduction is in `tfdist.gradients`.
"""

from tfdist.optimizers.lars import LARS, NORMS_AND_BIASES, MomentumCorrectedSGD
from tfdist.optimizers.learning_rate import WarmupAndDecay, make_learning_rate

__all__ = ["LARS", "NORMS_AND_BIASES", "MomentumCorrectedSGD", "WarmupAndDecay", "make_learning_rate"]
