"""Layers that communicate in their forward pass, sharding constraints on activations, and activation checkpointing.

Ordinary layers are Keras's.
"""

from tfdist.layers.mixture_of_experts import MixtureOfExperts
from tfdist.layers.sync_batch_norm import SyncBatchNormalization

__all__ = ["MixtureOfExperts", "SyncBatchNormalization"]
