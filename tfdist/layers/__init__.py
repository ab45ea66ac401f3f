"""Layers that communicate in their forward pass, or are laid out over a mesh by their dims."""

from tfdist.layers.mixture_of_experts import MixtureOfExperts
from tfdist.layers.sync_batch_norm import SyncBatchNormalization

__all__ = ["MixtureOfExperts", "SyncBatchNormalization"]
