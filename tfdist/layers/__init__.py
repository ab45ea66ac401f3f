"""Layers that communicate in their forward pass, sharding constraints on activations, and activation checkpointing.

All other layers come from Keras.
"""

from tfdist.layers.mixture_of_experts import MixtureOfExperts
from tfdist.layers.sync_batch_norm import SyncBatchNormalization

__all__ = ["MixtureOfExperts", "SyncBatchNormalization"]
