"""Compiles functions of batches whose number of rows varies."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.distribution.strategy import HasCollectives


def compiled_for_any_rows(strategy: HasCollectives, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of batches that calls `run`: once for all numbers of rows, or once for each if shapes are static."""
    if strategy.compiles_replicas:
        return strategy.compiled(function)
    return tf.function(function, autograph=False, reduce_retracing=True)
