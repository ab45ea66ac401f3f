"""Reproducible splits of labeled data sets."""

import numpy as np

from tfdist.errors import InputError
from tfdist.errors.formatting import is_number


def stratified(labels: np.ndarray, test_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits examples into training and test such that each class has nearly the same proportion in both.

    Args:
      labels: integers [n].
      test_size: number of test examples, in [0, n].

    Returns:
      The indices of the training examples and those of the test examples, each in random order.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    keys = generator.random(len(labels))
    by_class = np.lexsort((keys, labels))
    steps = np.arange(len(labels) + 1) * test_size // len(labels)
    in_test = steps[1:] > steps[:-1]  # every (n / test_size)-th example, ordered by class
    train, test = by_class[~in_test], by_class[in_test]
    return train[np.argsort(keys[train])], test[np.argsort(keys[test])]


def split_indices(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Splits a fraction off for validation, as `stratified` does; always the same examples.

    Args:
      labels: integers [n]; equal ones to ignore classes.
      fraction: fraction of the examples, in [0, 1); with 0, all are training examples, in their own order.

    Returns:
      The indices of the training examples, and those of the validation examples; both ascend.

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
    train, validation = stratified(labels, count)
    return np.sort(train), np.sort(validation)
