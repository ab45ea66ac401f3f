"""Batch normalization over the rows of all ranks, under Horovod's name."""

from typing import Any

import keras
import tensorflow as tf

from tfdist import layers
from tfdist.collectives import collectives_scope, current
from tfdist.errors import InputError
from tfdist.horovod.optimizer import patch_keras
from tfdist.horovod.process import engine, is_initialized


@keras.saving.register_keras_serializable(package="tfdist.horovod")
class SyncBatchNormalization(layers.SyncBatchNormalization):
    """`tfdist.layers.SyncBatchNormalization` over all ranks, wherever it is called.

    Horovod's layer squares means, which loses precision for inputs far from zero; this layer merges count, mean and M2.
    Every rank must call the layer the same number of times. Cost: see the base class. `fused` must be False; for the other
    arguments, see `keras.layers.BatchNormalization`.
    """

    communicates_across_ranks = True

    def __init__(self, fused: bool = False, **kwargs: Any):
        if fused is not False:
            raise InputError(f"SyncBatchNormalization has no fused form. Received: fused={fused}. Remove it.")
        super().__init__(**kwargs)
        patch_keras()

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        with collectives_scope(engine().collectives if is_initialized() else current()):
            return super().call(inputs, training=training, mask=mask)
