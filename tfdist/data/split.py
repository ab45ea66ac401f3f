"""Reproducible splits of labeled data sets."""

import numpy as np


def stratified(labels: np.ndarray, test_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Splits examples into training and test such that each class has nearly the same proportion in both.

    Args:
      labels: integers [n].
      test_size: number of test examples, in [0, n].
      seed: seed of the selection and of the orders.

    Returns:
      The indices of the training examples and those of the test examples, each in random order.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    keys = generator.random(len(labels))
    by_class = np.lexsort((keys, labels))
    steps = np.arange(len(labels) + 1) * test_size // len(labels)
    in_test = steps[1:] > steps[:-1]  # every (n / test_size)-th example, ordered by class
    train, test = by_class[~in_test], by_class[in_test]
    return train[np.argsort(keys[train])], test[np.argsort(keys[test])]
