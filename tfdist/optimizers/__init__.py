"""Optimizers and learning rates for large batches, and the catalog that builds Keras's own and these by name.

How gradients are summed before they are applied is `tfdist.gradients`.
"""

from tfdist.optimizers.lars import LARS, NORMS_AND_BIASES
from tfdist.optimizers.learning_rate import WarmupAndDecay, make_learning_rate
from tfdist.optimizers.momentum_corrected_sgd import MomentumCorrectedSGD

__all__ = ["LARS", "NORMS_AND_BIASES", "MomentumCorrectedSGD", "WarmupAndDecay", "make_learning_rate"]
