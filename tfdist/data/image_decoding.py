"""Decodes JPEG, PNG, BMP and GIF files to tensors of one shape."""

import dataclasses
import re
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import InputError, is_integer

_CHANNELS = (1, 3, 4)
_CONTEXT = re.compile(r"\{\{.*?\}\} ?")  # the name of a graph node in TensorFlow's messages


@dataclasses.dataclass(frozen=True)
class ImageDecoding:
    """Converts encoded images to tensors of one shape, float32 in [0, 1]."""

    height: int  # height of every decoded image
    width: int  # width of every decoded image
    channels: int  # 1 (gray), 3 (RGB) or 4 (RGBA); images with a different number of channels are converted
    resizes: bool  # whether images of other sizes are resized, as in Keras (bilinear), rather than rejected
    crops: bool = False  # whether a resized image keeps its aspect ratio, by cropping to its center

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a decoded image."""
        return self.height, self.width, self.channels

    def decode(self, files: tf.Tensor) -> tf.Tensor:
        """Returns images, float32 [n, height, width, channels], in [0, 1].

        Args:
          files: contents of the files, string [n].
        """
        dtype = tf.float32 if self.resizes else tf.uint8
        images = tf.map_fn(self._decode_image, files, fn_output_signature=tf.TensorSpec(self.shape, dtype))
        return tf.cast(images, tf.float32) / 255

    def _decode_image(self, content: tf.Tensor) -> tf.Tensor:
        image = _decode_content(content, self.channels)
        if self.resizes:
            if self.crops:
                image = _center_crop(image, self.width / self.height)
            image = tf.image.resize(image, (self.height, self.width))
        return tf.ensure_shape(image, self.shape)


def image_decoding(
    size: int | Sequence[int] | None, channels: int, crop_to_aspect_ratio: bool, name: str, first_content: bytes
) -> ImageDecoding:
    """Returns the decoding for the images of a dataset.

    Args:
      size: height and width, or one number for both; None if all images have the size of the first image.
      channels: see `ImageDecoding`.
      crop_to_aspect_ratio: see `ImageDecoding.crops`.
      name: name of the first image, for errors.
      first_content: contents of its file.

    Raises:
      InputError: an argument is out of range, or the first image cannot be decoded.
    """
    if channels not in _CHANNELS:
        raise InputError(f"channels must be 1 (gray), 3 (RGB) or 4 (RGBA). Received: {channels!r}.")
    first_shape = decoded_shape(name, first_content, channels)
    dims = first_shape[:2] if size is None else (size, size) if is_integer(size) else size
    if not isinstance(dims, list | tuple) or len(dims) != 2 or not all(is_integer(n) and n >= 1 for n in dims):
        raise InputError(f"size must be a positive number of pixels, or (height, width). Received: {size!r}.")
    return ImageDecoding(int(dims[0]), int(dims[1]), channels, size is not None, bool(crop_to_aspect_ratio))


def decoded_shape(name: str, content: bytes, channels: int) -> tuple[int, ...]:
    """Returns the shape of one image, after decoding it; raises `InputError` with its name if that fails."""
    try:
        with tf.device("CPU:0"):
            return tuple(_decode_content(tf.constant(content), channels).shape)
    except tf.errors.InvalidArgumentError as error:
        cause = without_context(error.message) if content else "it is empty"
        raise InputError(
            f"Images must be valid JPEG, PNG, BMP or GIF files. Received: {name}, which cannot be decoded: "
            f"{cause}. Remove or replace it."
        ) from error


def without_context(message: str) -> str:
    """Returns a TensorFlow error message without the name of the operation that failed."""
    return _CONTEXT.sub("", message).partition(" [Op:")[0].split("\n")[0].strip().rstrip(".")


def _decode_content(content: tf.Tensor, channels: int) -> tf.Tensor:
    return tf.io.decode_image(content, channels=channels, expand_animations=False)


def _center_crop(image: tf.Tensor, ratio: float) -> tf.Tensor:
    """Returns the largest centered part of an image with width / height = `ratio`, as in Keras."""
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float64))
    rows = tf.cast(tf.minimum(height, width / ratio), tf.int32)
    columns = tf.cast(tf.minimum(width, height * ratio), tf.int32)
    top, left = (tf.cast(height, tf.int32) - rows) // 2, (tf.cast(width, tf.int32) - columns) // 2
    return image[top : top + rows, left : left + columns]
