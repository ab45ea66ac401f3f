"""Augmentations that move pixels."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.data.augmentation.arguments import Augmentation, fraction, integer, interval
from tfdist.data.augmentation.row_random import RowRandom
from tfdist.errors import InputError
from tfdist.errors.number_checks import is_number

_AXES = {"horizontal": 1, "vertical": 0}


def flip(axis: str = "horizontal", probability: float = 0.5) -> Augmentation:
    """Mirrors an image with a probability.

    Args:
      axis: horizontal (left and right are exchanged) or vertical.
      probability: in [0, 1].
    """
    if axis not in _AXES:
        raise InputError(f"flip: axis must be horizontal or vertical. Received: {axis!r}.")
    probability = fraction("flip", "probability", probability)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        chosen = random.uniform(1)[:, 0] < probability
        # A third of the time of a reversed batch and `tf.where`, whose broadcast is slow.
        return tf.map_fn(flipped, (images, chosen), fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype))

    def flipped(row: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        image, is_chosen = row
        return tf.cond(is_chosen, lambda: tf.reverse(image, [_AXES[axis]]), lambda: image)

    return apply


def crop(padding: int = 4) -> Augmentation:
    """Pads an image with zeros on each side, and cuts an image of its size out at a random place (He et al. 2015).

    Args:
      padding: number of pixels, at least 1.
    """
    padding = integer("crop", "padding", padding)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        moves = tf.cast(random.uniform(2) * (2 * padding + 1), tf.int32)
        padded = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
        spec = tf.TensorSpec(images.shape[1:], images.dtype)
        return tf.map_fn(lambda row: _part(row[0], row[1], spec.shape), (padded, moves), fn_output_signature=spec)

    return apply


def resized_crop(scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (0.75, 4 / 3)) -> Augmentation:
    """Cuts a part of random area and aspect ratio out, and resizes it (bilinear) to the size of the image.

    Szegedy et al. 2014, arXiv:1409.4842. A part that would be higher or wider than the image is cut to its size.

    Args:
      scale: smallest and largest area, as a fraction of the image's, in (0, 1].
      ratio: smallest and largest ratio of width and height, relative to the image's; drawn uniformly in its logarithm.
    """
    scale = interval("resized_crop", "scale", scale, most=1)
    ratio = interval("resized_crop", "ratio", ratio)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        area, aspect, top, left = tf.unstack(random.uniform(4), axis=1)
        area = scale[0] + area * (scale[1] - scale[0])
        aspect = ratio[0] * (ratio[1] / ratio[0]) ** aspect
        height, width = tf.minimum(tf.sqrt(area / aspect), 1), tf.minimum(tf.sqrt(area * aspect), 1)
        top, left = top * (1 - height), left * (1 - width)
        rows = tf.range(tf.shape(images)[0])
        boxes = tf.stack([top, left, top + height, left + width], axis=1)
        return tf.cast(tf.image.crop_and_resize(images, boxes, rows, images.shape[1:3]), images.dtype)

    return apply


def rotate(degrees: float = 15.0) -> Augmentation:
    """Rotates an image around its center by a random angle (bilinear); what comes into view is 0.

    Args:
      degrees: largest angle in either direction, in (0, 180].
    """
    if not is_number(degrees) or not 0 < degrees <= 180:
        raise InputError(f"rotate: degrees must be in (0, 180]. Received: {degrees!r}.")
    largest = float(degrees) * 3.141592653589793 / 180

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        angle = (2 * random.uniform(1)[:, 0] - 1) * largest
        cos, sin = tf.cos(angle), tf.sin(angle)
        middle_y, middle_x = (images.shape[1] - 1) / 2, (images.shape[2] - 1) / 2
        zero = tf.zeros_like(angle)
        from_x = [cos, -sin, middle_x - cos * middle_x + sin * middle_y]
        from_y = [sin, cos, middle_y - sin * middle_x - cos * middle_y]
        turned = tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            transforms=tf.stack([*from_x, *from_y, zero, zero], axis=1),
            output_shape=images.shape[1:3],
            fill_value=0.0,
            interpolation="BILINEAR",
            fill_mode="CONSTANT",
        )
        return tf.ensure_shape(turned, images.shape)

    return apply


def _part(image: tf.Tensor, first: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns the part of an image that begins at a row and a column, int32 [2]."""
    return tf.slice(image, tf.concat([first, [0]], axis=0), shape)
