"""Splits of a labelled data set that are the same everywhere, always."""

import numpy as np


def stratified(labels: np.ndarray, test_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Divides examples between training and test, so that each class has nearly the same share in both.

    Args:
      labels: integers [n].
      test_size: examples of the test part, in [0, n].
      seed: of the choice and of the orders.

    Returns:
      The numbers of the training examples and those of the test examples, each in random order.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    keys = generator.random(len(labels))
    by_class = np.lexsort((keys, labels))
    steps = np.arange(len(labels) + 1) * test_size // len(labels)
    in_test = steps[1:] > steps[:-1]  # every (n / test_size)-th example, class after class
    train, test = by_class[~in_test], by_class[in_test]
    return train[np.argsort(keys[train])], test[np.argsort(keys[test])]
