"""XLA compilation for parts of a method that have static shapes and do not communicate."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@functools.cache
def compiled(function: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """Returns a function of tensors, compiled by XLA.

    Args:
      function: takes the static arguments, then tensors.
      *static: sizes that determine the shapes of the tensors, so that nothing is traced twice.
    """
    return tf.function(functools.partial(function, *static), jit_compile=True, autograph=False)
