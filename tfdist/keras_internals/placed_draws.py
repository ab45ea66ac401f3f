"""The tensors of random numbers that operations draw, for strategies that lay them out."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_stateless_random_ops_v2 as operations

# All functions of `tf.random.stateless_...`, `keras.random` and dropout call one of these.
_NAMES = (
    "stateless_random_gamma_v3",
    "stateless_random_normal_v2",
    "stateless_random_uniform_full_int_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_v2",
    "stateless_truncated_normal_v2",
)


@contextlib.contextmanager
def draws_placed(place: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Context in which each tensor that is drawn from a seed is replaced by `place` of it."""
    originals = {name: getattr(operations, name) for name in _NAMES}
    try:
        for name, original in originals.items():
            setattr(operations, name, _placed(original, place))
        yield
    finally:
        for name, original in originals.items():
            setattr(operations, name, original)


def _placed(original: Callable[..., tf.Tensor], place: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., tf.Tensor]:
    def function(*args: Any, **kwargs: Any) -> tf.Tensor:
        return place(original(*args, **kwargs))

    return function
