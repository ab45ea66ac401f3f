"""Augmentations that change the values of pixels; images are floating-point numbers in [0, 1]."""

import tensorflow as tf

from tfdist.data.augmentation.arguments import Augmentation, fraction
from tfdist.data.augmentation.row_random import RowRandom


def brightness(delta: float = 0.2) -> Augmentation:
    """Adds a random number in [-delta, delta] to all pixels, and clips them to [0, 1].

    Args:
      delta: in [0, 1].
    """
    delta = fraction("brightness", "delta", delta)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        added = _of_rows((2 * random.uniform(1)[:, 0] - 1) * delta, images)
        return tf.clip_by_value(images + added, 0, 1)

    return apply


def contrast(delta: float = 0.2) -> Augmentation:
    """Multiplies the distance of all pixels from the middle gray, 0.5, by a random factor in [1 - delta, 1 + delta].

    Args:
      delta: in [0, 1].
    """
    delta = fraction("contrast", "delta", delta)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        factor = _of_rows(1 + (2 * random.uniform(1)[:, 0] - 1) * delta, images)
        return tf.clip_by_value((images - 0.5) * factor + 0.5, 0, 1)

    return apply


def _of_rows(values: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, images.dtype)[:, None, None, None]
