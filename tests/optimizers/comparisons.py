"""Learning rates and weights, as numbers that tests compare."""

import numpy as np


def rates(schedule, steps):
    """Returns the learning rates of steps."""
    return [float(schedule(step)) for step in steps]


def largest_difference(found, expected):
    """Returns the largest absolute difference between weights by path."""
    return max(np.abs(found[path] - value).max() for path, value in expected.items())
