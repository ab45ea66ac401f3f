"""Random numbers that user code draws in a replica function, by `keras.random` or `tf.random`.

TensorFlow seeds an operation by its graph, so processes with the same seed draw the same numbers, and Keras's
generators outside of a model are variables that replicas would share. Inside `keyed`, each replica draws different
numbers; inside `neutral`, nothing is random.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

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


class _Source(Protocol):
    def draw(self, name: str, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Returns the result for a function of `tf.random`, or for dropout."""

    def seed(self, original: Callable[..., Any], seed: Any) -> tf.Tensor:
        """Returns the seed for a function of `keras.random`."""


_source: contextvars.ContextVar[_Source | None] = contextvars.ContextVar("random numbers", default=None)


@contextlib.contextmanager
def keyed(key: tf.Tensor, held: frozenset[int]) -> Iterator[None]:
    """Context in which draws depend only on a key and on the number of preceding draws.

    Args:
      key: [2] int32.
      held: ids of the states of generators that are already seeded.
    """
    with _drawing_from(_Keyed(key, held)):
        yield


@contextlib.contextmanager
def neutral(first_row: int | tf.Tensor | None) -> Iterator[None]:
    """Context without randomness: dropout drops nothing, and a drawn row depends only on its index in the batch.

    Args:
      first_row: index in the batch of the replica's first row; None for the same numbers in every row.
    """
    with _drawing_from(_Neutral(first_row)):
        yield


@contextlib.contextmanager
def _drawing_from(source: _Source) -> Iterator[None]:
    _install()
    token = _source.set(source)
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


class _Neutral:
    def __init__(self, first_row: int | tf.Tensor | None):
        self._first = None if first_row is None else tf.cast(first_row, tf.float64)

    def draw(self, name: str, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        if name == "shuffle":
            return tf.convert_to_tensor(given["value"])
        if name == "dropout":
            return tf.convert_to_tensor(given["x"])
        if "categorical" in name:
            chosen = tf.argmax(given["logits"], axis=-1, output_type=given.get("dtype") or tf.int64)
            return tf.repeat(chosen[..., None], given["num_samples"], axis=-1)
        low, high = given.get("minval", given.get("mean", 0.0)), given.get("maxval", given.get("stddev", 1.0))
        wave = self._wave(given["shape"])
        within = wave if "normal" in name else (1.0 + wave) / 2.0
        spread = (
            (tf.cast(high, tf.float64) - tf.cast(low, tf.float64)) if "uniform" in name and high is not None else high
        )
        values = tf.cast(low, tf.float64) + within * tf.cast(1.0 if spread is None else spread, tf.float64)
        return tf.cast(values, given.get("dtype") or tf.float32)

    def seed(self, original: Callable[..., Any], seed: Any) -> tf.Tensor:
        return tf.constant([0, 0], tf.int32)

    def _wave(self, shape: Any) -> tf.Tensor:
        """Returns a tensor of a shape, with values between -1 and 1."""
        shape = tf.cast(tf.convert_to_tensor(shape), tf.int32)
        columns = tf.range(tf.cast(tf.reduce_prod(shape[1:]), tf.float64), dtype=tf.float64)
        if shape.shape[0] == 0:
            return tf.reshape(tf.sin(1.0 + columns), [])
        rows = tf.range(tf.cast(shape[0], tf.float64), dtype=tf.float64)
        rows = rows * 0.0 if self._first is None else rows + self._first
        return tf.reshape(tf.sin(1.0 + columns + 0.7 * rows[:, None]), shape)


@functools.cache
def _install() -> None:
    """Wraps the functions, once per process; outside of `keyed` and `neutral` they behave as before."""
    for name in _NAMES:
        if getattr(getattr(tf.random, name), "__module__", "").startswith("tensorflow"):  # not replaced by the program
            setattr(tf.random, name, _watched(name, getattr(tf.random, name)))
    tf.nn.dropout = _watched("dropout", tf.nn.dropout)
    keras_random.dropout = _without_dropout(keras_random.dropout)
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


def _without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return inputs if isinstance(_source.get(), _Neutral) else original(inputs, *args, **kwargs)

    return dropout
