"""Wall-clock timing of replica functions on the host."""

import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from tfdist.distribution.strategy import Strategy

REPEATS = 5


def median_seconds(strategy: Strategy, function: Callable[[], tf.Tensor]) -> float:
    """Compiles a replica function and returns the median seconds until all local replicas have its result."""
    once = tf.function(lambda: strategy.run(function), autograph=False)
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        for value in strategy.local(once()):
            value.numpy()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first call compiles
