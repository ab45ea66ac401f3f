"""Makes random layers a function of (seed, step, replica): dropout masks differ between replicas and are reproducible.

`states` is the result of `seed_states`, and `step` a scalar int64, the number of previous updates.
"""

import contextlib
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from tfdist import keras_internals

_MAX_DRAWS = 1 << 16  # maximum number of draws of a generator per step and replica; more overlap with other replicas


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of the model's seed generators, in the order of its layers."""
    return [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


def integer_state(model: keras.Model) -> list[keras.Variable]:
    """Returns the integer and bool variables of layers, except the states of seed generators, which every step sets."""
    seeds = {id(variable) for variable in seed_states(model)}
    dtypes = [(variable, tf.as_dtype(variable.dtype)) for variable in model.non_trainable_variables]
    return [v for v, dtype in dtypes if (dtype.is_integer or dtype.is_bool) and id(v) not in seeds]


def reseed(states: Sequence[keras.Variable], seed: int, step: tf.Tensor, replica: tf.Tensor | int) -> None:
    """Sets each generator's state for a step, inside a replica function."""
    for state, value in zip(states, seed_values(states, seed, step, replica), strict=True):
        state.assign(value)


def seed_values(
    states: Sequence[keras.Variable], seed: int, step: tf.Tensor, replica: tf.Tensor | int
) -> list[tf.Tensor]:
    """Returns the values that `reseed` assigns."""
    return [tf.cast(tf.abs(_key(seed, i, step, replica)), state.dtype) for i, state in enumerate(states)]


def replica_random_scope(
    states: Sequence[keras.Variable], seed: int, step: tf.Tensor, replica: tf.Tensor | int, replicas: int
) -> AbstractContextManager[None]:
    """Reseeds the model's generators; returns a context in which other draws also depend only on (seed, step, replica).

    With one replica, other draws give the same numbers as without tfdist.
    """
    reseed(states, seed, step, replica)
    return contextlib.nullcontext() if replicas == 1 else _key_scope(states, _key(seed, len(states), step, replica))


def micro_batch_random_scope(
    states: Sequence[keras.Variable], seed: int, step: tf.Tensor, replica: tf.Tensor | int, micro_batch: tf.Tensor
) -> AbstractContextManager[None]:
    """Context in which draws outside of the model's generators also depend on the micro-batch, for code traced once."""
    key = _key(seed, len(states), step, replica)
    return _key_scope(states, tf.random.experimental.stateless_fold_in(key, micro_batch))


def inference_random_scope(
    states: Sequence[keras.Variable],
    seed: int,
    batch_index: tf.Tensor,
    replica: tf.Tensor | int,
    replicas: int,
    purpose: str,
) -> AbstractContextManager[None]:
    """Context for evaluation or prediction, in which all draws depend only on (seed, purpose, batch_index, replica).

    With one replica, draws are the same as without tfdist. Each purpose, such as "evaluate", has its own random numbers.
    """
    if replicas == 1:
        return contextlib.nullcontext()
    return replica_random_scope(states, zlib.crc32(f"{seed} {purpose}".encode()), batch_index, replica, replicas)


def _key_scope(states: Sequence[keras.Variable], key: tf.Tensor) -> AbstractContextManager[None]:
    return keras_internals.random_key_scope(key, frozenset(id(state) for state in states))


def _key(seed: int, index: int, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    key = tf.constant([seed & 0x7FFFFFFF, index], tf.int32)
    # Each draw of a Keras generator adds 1 to the second element of its key, which is the last number that is folded in.
    for part in (tf.cast(step, tf.int32), tf.cast(replica, tf.int32) * _MAX_DRAWS):
        key = tf.random.experimental.stateless_fold_in(key, part)
    return key
