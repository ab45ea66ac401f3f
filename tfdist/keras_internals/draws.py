"""Random numbers that user code draws in a replica function, by `keras.random` or `tf.random`.

TensorFlow seeds an operation by its graph, so processes with the same seed draw the same numbers, and Keras's
generators outside of a model are variables that replicas would share. Inside `keyed`, each replica draws different
numbers.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random

# Functions that use the graph's seed, and their stateless equivalents. Arguments that both have are passed by name.
_STATELESS = {
    "normal": "stateless_normal",
    "uniform": "stateless_uniform",
    "truncated_normal": "stateless_truncated_normal",
    "categorical": "stateless_categorical",
    "gamma": "stateless_gamma",
    "poisson": "stateless_poisson",
}
_NAMES = (*_STATELESS, *_STATELESS.values(), "shuffle", "stateless_binomial")


_source: contextvars.ContextVar["_Keyed | None"] = contextvars.ContextVar("random numbers", default=None)


@contextlib.contextmanager
def keyed(key: tf.Tensor, held: frozenset[int]) -> Iterator[None]:
    """Context in which draws depend only on a key and on the number of preceding draws.

    Args:
      key: [2] int32.
      held: ids of the states of generators that are already seeded.
    """
    _install()
    token = _source.set(_Keyed(key, held))
    try:
        yield
    finally:
        _source.reset(token)


class _Keyed:
    def __init__(self, key: tf.Tensor, held: frozenset[int]):
        self._key, self._held, self._draws = key, held, 0

    def draw(self, name: str, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        if name == "shuffle":
            return tf.random.experimental.stateless_shuffle(given["value"], seed=self._next())
        if name == "dropout":
            found = {key: given[key] for key in ("x", "rate", "noise_shape") if given.get(key) is not None}
            return tf.nn.experimental.stateless_dropout(**found, seed=self._next())
        if name not in _STATELESS:
            return original(**given)
        stateless = getattr(tf.random, _STATELESS[name])
        known = inspect.signature(stateless).parameters
        return stateless(
            **{key: value for key, value in given.items() if key in known and key != "seed"}, seed=self._next()
        )

    def seed(self, original: Callable[..., Any], seed: Any) -> tf.Tensor:
        if isinstance(seed, keras.random.SeedGenerator) and id(seed.state) in self._held:
            return original(seed)
        return self._next()

    def _next(self) -> tf.Tensor:
        self._draws += 1
        return tf.random.experimental.stateless_fold_in(self._key, self._draws)


@functools.cache
def _install() -> None:
    """Wraps the functions, once per process; outside of `keyed` they behave as before."""
    for name in _NAMES:
        if getattr(getattr(tf.random, name), "__module__", "").startswith("tensorflow"):  # not replaced by the program
            setattr(tf.random, name, _watched(name, getattr(tf.random, name)))
    tf.nn.dropout = _watched("dropout", tf.nn.dropout)
    original = keras_random.draw_seed

    def draw_seed(seed: Any) -> tf.Tensor:
        source = _source.get()
        return original(seed) if source is None else source.seed(original, seed)

    keras_random.draw_seed = draw_seed


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        source = _source.get()
        if source is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return source.draw(name, original, dict(given.arguments))

    return function
