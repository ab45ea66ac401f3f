"""Augmentations that set a rectangle to zero."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.data.augmentation.arguments import Augmentation, fraction, integer, interval
from tfdist.data.augmentation.row_random import RowRandom


def cutout(size: int = 8) -> Augmentation:
    """Sets a square around a random pixel to 0; it may extend beyond the image (DeVries, Taylor 2017, arXiv:1708.04552).

    Args:
      size: pixels on each side, at least 1.
    """
    size = integer("cutout", "size", size)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        height, width = images.shape[1:3]
        middle = tf.cast(random.uniform(2) * [float(height), float(width)], tf.int32)
        first = middle - size // 2
        return _without(images, first, first + size)

    return apply


def erase(
    probability: float = 0.5, scale: Sequence[float] = (0.02, 0.33), ratio: Sequence[float] = (0.3, 3.3)
) -> Augmentation:
    """Sets a rectangle to 0 with a probability (random erasing, Zhong et al. 2017, arXiv:1708.04896).

    Args:
      probability: in [0, 1].
      scale: smallest and largest area, as a fraction of the image's, in (0, 1].
      ratio: smallest and largest ratio of height and width; drawn uniformly in its logarithm.
    """
    probability = fraction("erase", "probability", probability)
    scale, ratio = interval("erase", "scale", scale, most=1), interval("erase", "ratio", ratio)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        height, width = images.shape[1:3]
        chance, area, aspect, top, left = tf.unstack(random.uniform(5), axis=1)
        pixels = (scale[0] + area * (scale[1] - scale[0])) * height * width
        aspect = ratio[0] * (ratio[1] / ratio[0]) ** aspect
        rows, columns = tf.minimum(tf.sqrt(pixels * aspect), height), tf.minimum(tf.sqrt(pixels / aspect), width)
        sizes = tf.cast(tf.round(tf.stack([rows, columns], axis=1)), tf.int32)
        free = tf.constant([height, width]) - sizes + 1
        first = tf.cast(tf.stack([top, left], axis=1) * tf.cast(free, tf.float32), tf.int32)
        return _without(images, first, first + tf.where((chance < probability)[:, None], sizes, 0))

    return apply


def _without(images: tf.Tensor, first: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    """Returns images with 0 in rows and columns [first, end), int32 [n, 2]."""
    rows, columns = (tf.range(images.shape[1 + axis]) for axis in (0, 1))
    in_rows = (rows >= first[:, :1]) & (rows < end[:, :1])
    in_columns = (columns >= first[:, 1:]) & (columns < end[:, 1:])
    kept = tf.cast(~(in_rows[:, :, None] & in_columns[:, None, :]), images.dtype)
    return images * kept[..., None]
