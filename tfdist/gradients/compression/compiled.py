"""XLA for the parts of a method that neither communicate nor have dynamic shapes."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@functools.cache
def compiled(function: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """Returns a function of tensors, compiled by XLA.

    Args:
      function: takes the static arguments, then tensors.
      *static: sizes, such that the shapes of the tensors follow from them: then nothing is ever traced twice.
    """
    return tf.function(functools.partial(function, *static), jit_compile=True, autograph=False)
