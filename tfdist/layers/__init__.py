"""Layers that communicate in their forward pass."""

from tfdist.layers.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
