"""Reproducible splits of labeled data sets."""

import numpy as np

from tfdist.errors import InputError
from tfdist.errors.formatting import is_number


def stratified_split(labels: np.ndarray, test_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits examples into training and test such that each class has nearly the same proportion in both.

    Args:
      labels: integers [n].
      test_size: number of test examples, in [0, n].

    Returns:
      The indices of the training and of the test examples, each in random order.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    keys = generator.random(len(labels))
    order = np.lexsort((keys, labels))
    steps = np.arange(len(labels) + 1) * test_size // len(labels)
    is_test = steps[1:] > steps[:-1]  # every (n / test_size)-th example, ordered by class
    train, test = order[~is_test], order[is_test]
    return train[np.argsort(keys[train])], test[np.argsort(keys[test])]


def split_indices(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Splits off a fraction for validation, as `stratified_split` does; always the same examples.

    Args:
      labels: integers [n]; all equal to ignore classes.
      fraction: fraction of the examples, in [0, 1); with 0, all are training examples, in their original order.

    Returns:
      The indices of the training examples and of the validation examples, both ascending.

    Raises:
      InputError: the fraction is out of range, or leaves no example for one part.
    """
    if not is_number(fraction) or not 0 <= fraction < 1:
        raise InputError(f"validation_split must be a fraction in [0, 1). Received: {fraction!r}.")
    if not fraction:
        return np.arange(len(labels)), np.arange(0)
    count = round(len(labels) * fraction)
    if not 0 < count < len(labels):
        raise InputError(
            f"validation_split must leave examples for both parts. Received: {fraction} of {len(labels)} examples."
        )
    train, validation = stratified_split(labels, count)
    return np.sort(train), np.sort(validation)
