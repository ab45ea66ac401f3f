"""Augmentations: random changes of training images, with separate random numbers for each image."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.rules import parse_chain
from tfdist.config.spec import Spec, call, call_user_function, load_object
from tfdist.data.examples import Element, Examples, Transform, WrappedExamples, identity
from tfdist.data.row_partition import IndexedBatch, RowPartition
from tfdist.data.source import ROUNDS, random_keys
from tfdist.errors import InputError, is_integer, is_number, names_arguments, nearest

_BITS = 53
_FRACTION_BITS = 24  # precision of a float32
_MAX_RATIO = 1e6  # maximum aspect ratio


@dataclasses.dataclass(frozen=True)
class RowRandom:
    """Random numbers for the rows of a batch, which depend only on (seed, stream, epoch, example).

    Attributes:
      positions: int64 [n], epoch * examples per epoch + index of the example, for each row; below 2**53.
      seed: any integer.
      stream: index of the random stream, at least 0; each augmentation in a chain has its own independent stream.
    """

    positions: tf.Tensor
    seed: int
    stream: int = 0

    def uniform(self, count: int) -> tf.Tensor:
        """Returns numbers in [0, 1), float32 [n, count]; every call returns the same numbers."""
        fractions = tf.bitwise.right_shift(self._words(count), tf.constant(_BITS - _FRACTION_BITS, tf.int64))
        return tf.cast(fractions, tf.float32) / 2**_FRACTION_BITS

    @property
    def seeds(self) -> tf.Tensor:
        """A seed for each row, int32 [n, 2], to pass to `tf.random.stateless_uniform` and similar functions."""
        return tf.cast(tf.bitwise.bitwise_and(self._words(2), tf.constant(2**31 - 1, tf.int64)), tf.int32)

    def _words(self, count: int) -> tf.Tensor:
        """Returns int64 [n, count] in [0, 2**53): in each column, the positions mapped by another keyed permutation."""
        # The second word is at least 1, because it is 0 in the keys for the order of examples.
        keys = random_keys(count, self.seed, tf.constant([0, 1 + self.stream], tf.uint64))
        max_index = tf.constant(2**_BITS - 1, tf.int64)
        columns = [
            tf.raw_ops.RandomIndexShuffle(index=self.positions, seed=keys[column], max_index=max_index, rounds=ROUNDS)
            for column in range(count)
        ]
        return tf.stack(columns, axis=1)


# (images [n, height, width, channels], random numbers of the rows) -> images of the same shape and dtype.
Augmentation = Callable[[tf.Tensor, RowRandom], tf.Tensor]


# These functions validate an argument of an augmentation: they return its value or raise `InputError`.


def _fraction(name: str, argument: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 1:
        raise InputError(f"{name}: {argument} must be in [0, 1]. Received: {value!r}.")
    return float(value)


def _positive_integer(name: str, argument: str, value: Any) -> int:
    if not is_integer(value) or value < 1:
        raise InputError(f"{name}: {argument} must be an integer of at least 1. Received: {value!r}.")
    return int(value)


def _interval(name: str, argument: str, value: Sequence[float], maximum: float) -> tuple[float, float]:
    bounds = tuple(value) if isinstance(value, list | tuple) else ()
    if len(bounds) != 2 or not all(map(is_number, bounds)) or not 0 < bounds[0] <= bounds[1] <= maximum:
        raise InputError(
            f"{name}: {argument} must be (smallest, largest), both positive and at most {maximum:g}. Received: {value!r}."
        )
    return float(bounds[0]), float(bounds[1])


def brightness(delta: float = 0.2) -> Augmentation:
    """Adds a random number in [-delta, delta] to all pixels, and clips them to [0, 1]; `delta` is in [0, 1]."""
    delta = _fraction("brightness", "delta", delta)
    return lambda images, random: tf.clip_by_value(images + _random_in(images, random, delta), 0, 1)


def contrast(delta: float = 0.2) -> Augmentation:
    """Multiplies the differences of all pixels from 0.5 by a random factor in 1 +- `delta`, which is in [0, 1]."""
    delta = _fraction("contrast", "delta", delta)
    return lambda images, random: tf.clip_by_value((images - 0.5) * _random_in(images, random, delta, 1) + 0.5, 0, 1)


def _random_in(images: tf.Tensor, random: RowRandom, delta: float, middle: float = 0) -> tf.Tensor:
    """Returns a number in [middle - delta, middle + delta] for each image, [n, 1, 1, 1]."""
    values = middle + (2 * random.uniform(1)[:, 0] - 1) * delta
    return tf.cast(values, images.dtype)[:, None, None, None]


def cutout(size: int = 8) -> Augmentation:
    """Sets a square around a random pixel to 0; it may extend beyond the image (DeVries, Taylor 2017, arXiv:1708.04552).

    Args:
      size: length of the square's sides in pixels, at least 1.
    """
    size = _positive_integer("cutout", "size", size)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        height, width = images.shape[1:3]
        middle = tf.cast(random.uniform(2) * [float(height), float(width)], tf.int32)
        start = middle - size // 2
        return _erase(images, start, start + size)

    return apply


def erase(
    probability: float = 0.5, scale: Sequence[float] = (0.02, 0.33), ratio: Sequence[float] = (0.3, 3.3)
) -> Augmentation:
    """Sets a random rectangle to 0 with the given probability (random erasing, Zhong et al. 2017, arXiv:1708.04896).

    Args:
      probability: probability of erasing, in [0, 1].
      scale: smallest and largest area, as a fraction of the image's area, in (0, 1].
      ratio: smallest and largest ratio of height to width; its logarithm is drawn uniformly.
    """
    probability = _fraction("erase", "probability", probability)
    scale = _interval("erase", "scale", scale, maximum=1)
    ratio = _interval("erase", "ratio", ratio, maximum=_MAX_RATIO)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        height, width = images.shape[1:3]
        chance, area, aspect, top, left = tf.unstack(random.uniform(5), axis=1)
        pixels = (scale[0] + area * (scale[1] - scale[0])) * height * width
        aspect = ratio[0] * (ratio[1] / ratio[0]) ** aspect
        rows, columns = tf.minimum(tf.sqrt(pixels * aspect), height), tf.minimum(tf.sqrt(pixels / aspect), width)
        sizes = tf.cast(tf.round(tf.stack([rows, columns], axis=1)), tf.int32)
        position_counts = tf.constant([height, width]) - sizes + 1
        start = tf.cast(tf.stack([top, left], axis=1) * tf.cast(position_counts, tf.float32), tf.int32)
        return _erase(images, start, start + tf.where((chance < probability)[:, None], sizes, 0))

    return apply


def _erase(images: tf.Tensor, start: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    """Sets the rows and columns [start, end), int32 [n, 2], of each image to 0."""
    rows, columns = (tf.range(images.shape[1 + axis]) for axis in (0, 1))
    row_mask = (rows >= start[:, :1]) & (rows < end[:, :1])
    column_mask = (columns >= start[:, 1:]) & (columns < end[:, 1:])
    mask = tf.cast(~(row_mask[:, :, None] & column_mask[:, None, :]), images.dtype)
    return images * mask[..., None]


_AXES = {"horizontal": 1, "vertical": 0}


def flip(axis: str = "horizontal", probability: float = 0.5) -> Augmentation:
    """Mirrors an image with the given probability.

    Args:
      axis: "horizontal" (exchanges left and right) or "vertical".
      probability: probability of mirroring, in [0, 1].
    """
    if axis not in _AXES:
        raise InputError(f"flip: axis must be horizontal or vertical. Received: {axis!r}.")
    probability = _fraction("flip", "probability", probability)

    def flip_row(row: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        image, should_flip = row
        return tf.cond(should_flip, lambda: tf.reverse(image, [_AXES[axis]]), lambda: image)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        rows = images, random.uniform(1)[:, 0] < probability
        # Takes a third of the time of `tf.where` with a reversed batch, whose broadcast is slow.
        return tf.map_fn(flip_row, rows, fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype))

    return apply


def crop(padding: int = 4) -> Augmentation:
    """Pads an image with zeros on each side, and crops it to its original size at a random position (He et al. 2015).

    Args:
      padding: number of pixels on each side, at least 1.
    """
    padding = _positive_integer("crop", "padding", padding)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        offsets = tf.cast(random.uniform(2) * (2 * padding + 1), tf.int32)
        padded_images = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
        spec = tf.TensorSpec(images.shape[1:], images.dtype)
        starts = tf.pad(offsets, [[0, 0], [0, 1]])  # row, column and channel
        return tf.map_fn(lambda row: tf.slice(*row, spec.shape), (padded_images, starts), fn_output_signature=spec)

    return apply


def resized_crop(scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (0.75, 4 / 3)) -> Augmentation:
    """Crops a region of random area and aspect ratio, and resizes it (bilinear) to the size of the image.

    Szegedy et al. 2014, arXiv:1409.4842. A region that would exceed the image is clipped to it.

    Args:
      scale: smallest and largest area, as a fraction of the image's area, in (0, 1].
      ratio: smallest and largest ratio of width to height, relative to the image's; its logarithm is drawn uniformly.
    """
    scale = _interval("resized_crop", "scale", scale, maximum=1)
    ratio = _interval("resized_crop", "ratio", ratio, maximum=_MAX_RATIO)

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
    """Rotates an image around its center by a random angle (bilinear); pixels from outside the image are 0.

    Args:
      degrees: largest angle in either direction, in (0, 180].
    """
    if not is_number(degrees) or not 0 < degrees <= 180:
        raise InputError(f"rotate: degrees must be in (0, 180]. Received: {degrees!r}.")
    max_angle = float(degrees) * 3.141592653589793 / 180

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        angle = (2 * random.uniform(1)[:, 0] - 1) * max_angle
        cos, sin = tf.cos(angle), tf.sin(angle)
        middle_y, middle_x = (images.shape[1] - 1) / 2, (images.shape[2] - 1) / 2
        zero = tf.zeros_like(angle)
        x_transform = [cos, -sin, middle_x - cos * middle_x + sin * middle_y]
        y_transform = [sin, cos, middle_y - sin * middle_x - cos * middle_y]
        rotated_images = tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            transforms=tf.stack([*x_transform, *y_transform, zero, zero], axis=1),
            output_shape=images.shape[1:3],
            fill_value=0.0,
            interpolation="BILINEAR",
            fill_mode="CONSTANT",
        )
        return tf.ensure_shape(rotated_images, images.shape)

    return apply


_FUNCTIONS = (brightness, contrast, crop, cutout, erase, flip, resized_crop, rotate)
AUGMENTATIONS: dict[str, Callable[..., Augmentation]] = {function.__name__: function for function in _FUNCTIONS}


def parse_augmentations(text: str) -> tuple[Augmentation, ...]:
    """Parses augmentations separated by `|`: names or `package.module:function`, each optionally with arguments.

    Raises:
      InputError: a name is unknown, or its arguments are invalid.
    """
    return tuple(map(_make_augmentation, parse_chain(text)))


def _make_augmentation(spec: Spec) -> Augmentation:
    if spec.name in AUGMENTATIONS:
        return call(AUGMENTATIONS[spec.name], spec)
    if ":" not in spec.name:
        raise InputError(f"--augment={spec.name} is not known.{nearest(spec.name, AUGMENTATIONS)}")
    function = load_object(spec.name)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        return tf.convert_to_tensor(call_user_function("--augment", function, spec, images=images, random=random))

    return apply


class AugmentedExamples(WrappedExamples):
    """Examples whose x is an image, augmented in training but not in evaluation.

    The augmentation of an example depends on the seed of the run, the epoch and the index of the example, but not on the
    batch size, the number of replicas, or the step at which a run resumes.
    """

    def __init__(self, examples: Examples, augmentations: Sequence[Augmentation], transform: Transform = identity):
        """Wraps the examples.

        Args:
          examples: examples whose x is an image, floating-point [height, width, channels] in [0, 1].
          augmentations: augmentations to apply, in order.
          transform: transform of the augmented batches; see `Examples.map`.

        Raises:
          InputError: x is not such an image, or an augmentation changes its shape or dtype.
        """
        super().__init__(examples, examples.size)
        self._augmentations, self._transform = tuple(augmentations), transform
        x = examples.element_spec[0]
        is_tensor = isinstance(x, tf.TensorSpec)
        if not (is_tensor and x.shape.rank == 3 and x.shape.is_fully_defined() and x.dtype.is_floating):
            received = f"{x.dtype.name}{list(x.shape)}" if is_tensor else type(x).__name__
            raise InputError(
                "--augment requires images, floating-point [height, width, channels] of known size. Received: x of "
                f"{received}. Do not set it for this dataset."
            )
        with tf.Graph().as_default():  # checks the augmentations by tracing them
            self._augment(tf.zeros([1, *x.shape], x.dtype), tf.zeros([1], tf.int64), seed=0)

    @property
    def element_spec(self) -> Any:
        return self._examples.map(self._transform).element_spec

    @property
    def sample(self) -> Examples:
        return AugmentedExamples(self._examples.sample, self._augmentations, self._transform)

    def map(self, transform: Transform) -> Self:
        return Examples.map(self, transform)

    def preview(self, rows: int) -> Element:
        return self._examples.map(self._transform).preview(rows)

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        if seed is None:
            return self._examples.map(self._transform).indexed_batches(partition, None)

        @keras_internals.without_autograph
        def augment(element: tf.Tensor, batch: IndexedBatch) -> IndexedBatch:
            epochs = partition.positions(element) // self.size
            x, *targets = batch.batch
            x = self._augment(x, epochs * self.size + batch.indices, seed)
            return IndexedBatch(keras_internals.with_autograph(self._transform)(x, *targets), batch.indices)

        batches = self._examples.indexed_batches(partition, seed).enumerate()
        return batches.map(augment, num_parallel_calls=tf.data.AUTOTUNE)

    @keras_internals.without_autograph
    def _augment(self, images: tf.Tensor, positions: tf.Tensor, seed: int) -> tf.Tensor:
        for stream, augmentation in enumerate(self._augmentations):
            outputs = keras_internals.with_autograph(augmentation)(images, RowRandom(positions, seed, stream))
            if outputs.dtype != images.dtype or not outputs.shape.is_compatible_with(images.shape):
                raise InputError(
                    f"An augmentation must keep shape and dtype. Received: augmentation {stream + 1} of --augment, which "
                    f"returns {outputs.dtype.name}{list(outputs.shape)} for {images.dtype.name}{list(images.shape)}."
                )
            images = tf.ensure_shape(outputs, images.shape)
        return images


@names_arguments
def augmented(examples: Examples, augment: str | Sequence[Augmentation]) -> Examples:
    """Returns examples whose images are augmented in training; `examples` itself if there are no augmentations.

    Args:
      examples: examples to augment; see `AugmentedExamples`.
      augment: a chain as in `--augment`, such as `flip|crop(padding=4)`; or functions of (images, `RowRandom`).

    Raises:
      InputError: a name or an argument is invalid, or x is not an image.
    """
    augmentations = parse_augmentations(augment) if isinstance(augment, str) else tuple(augment)
    return AugmentedExamples(examples, augmentations) if augmentations else examples
