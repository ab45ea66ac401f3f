"""Examples whose images are changed at random when they are used for training."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.augmentation.catalog import Augmentation, parse_augmentations
from tfdist.data.augmentation.row_random import RowRandom
from tfdist.data.examples import Element, Examples, Transform, WrappedExamples, as_is, chain
from tfdist.data.indexed_batch import IndexedBatch
from tfdist.data.row_partition import RowPartition
from tfdist.errors import InputError, names_arguments


class Augmented(WrappedExamples):
    """Examples whose x is one image, changed in training and unchanged in evaluation.

    What happens to an example depends on the seed of the run, the epoch and the example's index: not on the batch size,
    the number of replicas, or the step at which a run resumes.
    """

    def __init__(self, examples: Examples, augmentations: Sequence[Augmentation], transform: Transform = as_is):
        """Wraps the examples.

        Args:
          examples: x is an image, floating-point [height, width, channels] in [0, 1].
          augmentations: applied in order.
          transform: applied to batches afterwards; see `Examples.map`.

        Raises:
          InputError: x is something else, or an augmentation changes its shape or dtype.
        """
        super().__init__(examples, examples.size)
        self._augmentations, self._transform = tuple(augmentations), transform
        x = examples.element_spec[0]
        if not (
            isinstance(x, tf.TensorSpec) and x.shape.rank == 3 and x.shape.is_fully_defined() and x.dtype.is_floating
        ):
            found = f"{x.dtype.name}{list(x.shape)}" if isinstance(x, tf.TensorSpec) else type(x).__name__
            raise InputError(
                f"--augment changes images, floating-point [height, width, channels] of known size. Received: x of {found}. "
                "Leave it out for this data set."
            )
        with tf.Graph().as_default():  # traces the augmentations as a check
            self._changed(tf.zeros([1, *x.shape], x.dtype), tf.zeros([1], tf.int64), seed=0)

    @property
    def element_spec(self) -> Any:
        """See base class."""
        return self._examples.map(self._transform).element_spec

    @property
    def sample(self) -> Examples:
        """See base class."""
        return Augmented(self._examples.sample, self._augmentations, self._transform)

    def in_order(self) -> "Augmented":
        """See base class."""
        return Augmented(self._examples.in_order(), self._augmentations, self._transform)

    def map(self, transform: Transform) -> "Augmented":
        """See base class."""
        return Augmented(self._examples, self._augmentations, chain(self._transform, transform))

    def look_at(self, rows: int) -> Element:
        """See base class."""
        return self._examples.map(self._transform).look_at(rows)

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        """See base class."""
        if seed is None:
            return self._examples.map(self._transform).indexed_batches(partition, None)

        @keras_internals.without_autograph
        def change(element: tf.Tensor, batch: IndexedBatch) -> IndexedBatch:
            epochs = partition.positions(element) // self.size
            x, *rest = batch.batch
            x = self._changed(x, epochs * self.size + batch.numbers, seed)
            return IndexedBatch(keras_internals.with_autograph(self._transform)(x, *rest), batch.numbers)

        batches = self._examples.indexed_batches(partition, seed).enumerate()
        return batches.map(change, num_parallel_calls=tf.data.AUTOTUNE)

    @keras_internals.without_autograph
    def _changed(self, images: tf.Tensor, places: tf.Tensor, seed: int) -> tf.Tensor:
        for stream, augmentation in enumerate(self._augmentations):
            found = keras_internals.with_autograph(augmentation)(images, RowRandom(places, seed, stream))
            if found.dtype != images.dtype or not found.shape.is_compatible_with(images.shape):
                raise InputError(
                    f"An augmentation must keep shape and dtype. Received: {images.dtype.name}{list(images.shape)} became "
                    f"{found.dtype.name}{list(found.shape)}, by number {stream + 1} of --augment."
                )
            images = tf.ensure_shape(found, images.shape)
        return images


@names_arguments
def augmented(examples: Examples, augment: str | Sequence[Augmentation]) -> Examples:
    """Returns examples whose images are changed at random in training, or the examples themselves if nothing is to change.

    Args:
      examples: see `Augmented`.
      augment: a chain as in `--augment`, such as `flip|crop(padding=4)`; or functions of (images, `RowRandom`).

    Raises:
      InputError: a name or an argument is invalid, or x is no image.
    """
    chosen = parse_augmentations(augment) if isinstance(augment, str) else tuple(augment)
    return Augmented(examples, chosen) if chosen else examples
