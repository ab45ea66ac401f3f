"""Optimizers and learning-rate rules for large batches, beside all of Keras's own (`keras.optimizers.Lamb` is LAMB)."""

from tfdist.optimizers.lars import LARS, NORMS_AND_BIASES
from tfdist.optimizers.learning_rate import WarmupAndDecay, make_learning_rate
from tfdist.optimizers.momentum_corrected_sgd import MomentumCorrectedSGD

__all__ = ["LARS", "NORMS_AND_BIASES", "MomentumCorrectedSGD", "WarmupAndDecay", "make_learning_rate"]
