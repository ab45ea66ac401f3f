"""Synthetic data of any shape: arrays drawn from a seed that a model can learn."""

import math
from collections.abc import Sequence

import numpy as np

from tfdist.data.data_set import DataSet
from tfdist.data.images import scaled
from tfdist.data.source import ArraySource
from tfdist.errors import InputError

_NOISE = 40  # standard deviation, relative to 255


def synthetic(
    shape: Sequence[int] | str = (28, 28, 1), classes: int = 10, size: int = 1024, test_size: int = 256, seed: int = 0
) -> DataSet:
    """Examples of classes with different means, plus noise; stored as bytes, x is float32 in [0, 1].

    Args:
      shape: shape of one example's x; as text, "224x224x3".
      classes: number of classes, at least 1.
      size: number of training examples, at least 1.
      test_size: number of test examples, at least 0.
      seed: seed of all draws.

    Raises:
      InputError: an argument is out of range.
    """
    dims = _dims(shape)
    if min(classes, size, test_size + 1) < 1:
        raise InputError(
            "synthetic needs classes and size of at least 1, test_size of at least 0. "
            f"Received: classes={classes}, size={size}, test_size={test_size}."
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    means = generator.integers(64, 192, (classes, *dims), np.uint8)
    train = _draw(generator, means, size)
    test = _draw(generator, means, test_size) if test_size else None
    return DataSet(f"synthetic:{'x'.join(map(str, dims))}", train, test, dims, classes)


def _draw(generator: np.random.Generator, means: np.ndarray, size: int) -> ArraySource:
    labels = generator.integers(0, len(means), size, np.int32)
    images = np.empty((size, *means.shape[1:]), np.uint8)
    for image, label in zip(images, labels, strict=True):  # noise for all at once would take 4 times the memory
        noise = generator.standard_normal(image.shape, np.float32) * _NOISE
        image[...] = np.clip(means[label] + noise, 0, 255)
    return ArraySource((images, labels), scaled(255))


def _dims(shape: Sequence[int] | str) -> tuple[int, ...]:
    try:
        dims = tuple(int(dim) for dim in (shape.split("x") if isinstance(shape, str) else shape))
    except (TypeError, ValueError):
        dims = ()
    if not dims or math.prod(dims) < 1 or min(dims) < 1:
        raise InputError(f"The shape of synthetic data must be as in synthetic:224x224x3. Received: {shape!r}.")
    return dims
