"""Layers that communicate or have a row per key, sharding constraints on activations, and activation checkpointing.

`mesh_layouts` implements the layouts of tensors on a mesh. All other layers come from Keras.
"""

from tfdist.layers.dynamic_embedding import DynamicEmbedding
from tfdist.layers.mixture_of_experts import MixtureOfExperts
from tfdist.layers.sync_batch_norm import SyncBatchNormalization

__all__ = ["DynamicEmbedding", "MixtureOfExperts", "SyncBatchNormalization"]
