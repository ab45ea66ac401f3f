"""The outputs of a model as a list of tensors: with each output its mask and its logits, if it has them."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals


class OutputTensors:
    """Converts outputs to a list of tensors, and back."""

    def __init__(self, outputs: Any):
        """Remembers the structure.

        Args:
          outputs: outputs of the model, with masks and logits attached as all later ones have.
        """
        self._structure = keras.tree.map_structure(lambda _: None, outputs)
        attached = [keras_internals.mask_and_logits(output) for output in keras.tree.flatten(outputs)]
        self._has = [[each is not None for each in pair] for pair in attached]

    def tensors(self, outputs: Any) -> list[tf.Tensor]:
        """Returns the list for outputs; empty for None."""
        flat = [] if outputs is None else keras.tree.flatten(outputs)
        parts = [x for output in flat for x in (output, *keras_internals.mask_and_logits(output))]
        return [x for x in parts if x is not None]

    def packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Inverse of `tensors`."""
        remaining, outputs = iter(tensors), []
        for has_mask, has_logits in self._has:
            output = tf.identity(next(remaining))
            mask = next(remaining) if has_mask else None
            keras_internals.set_mask_and_logits(output, mask, next(remaining) if has_logits else None)
            outputs.append(output)
        return keras.tree.pack_sequence_as(self._structure, outputs)
