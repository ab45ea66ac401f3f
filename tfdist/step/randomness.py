"""Random layers as a pure function of (seed, step, replica): masks differ between replicas and repeat exactly."""

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """The states of the model's seed generators, in the order of its layers."""
    return [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


def reseed(states: Sequence[keras.Variable], seed: int, step: tf.Tensor, replica: tf.Tensor | int) -> None:
    """Sets each generator's state for one replica's step, inside its replica function.

    Args:
      states: what `seed_states` returned.
      seed: the run's.
      step: scalar int64, the number of updates done before this step.
      replica: this replica's number.
    """
    for i, state in enumerate(states):
        state.assign(tf.cast(tf.abs(_key(seed, i, step, replica)), state.dtype))


@contextlib.contextmanager
def own(
    states: Sequence[keras.Variable], seed: int, step: tf.Tensor, replica: tf.Tensor | int, replicas: int
) -> Iterator[None]:
    """Inside, what a replica's code draws beside the model's generators follows from (seed, step, replica), too.

    With one replica it is drawn as without tfdist.

    Args:
      states: what `seed_states` returned.
      seed: the run's.
      step: scalar int64, the number of updates done before this step.
      replica: this replica's number.
      replicas: how many there are.
    """
    if replicas == 1:
        yield
        return
    key = _key(seed, len(states), step, replica)
    with keras_internals.keyed(key, frozenset(id(state) for state in states)):
        yield


@contextlib.contextmanager
def not_training(
    states: Sequence[keras.Variable],
    seed: int,
    purpose: str,
    number: tf.Tensor,
    replica: tf.Tensor | int,
    replicas: int,
) -> Iterator[None]:
    """Inside, all that a replica draws in an evaluation or a prediction follows from (seed, purpose, number, replica).

    With one replica it is drawn as without tfdist.

    Args:
      states: what `seed_states` returned.
      seed: the run's.
      purpose: what is drawn for, such as "evaluate"; each has random numbers of its own.
      number: scalar int64, the number of the batch.
      replica: this replica's number.
      replicas: how many there are.
    """
    if replicas == 1:
        yield
        return
    of_purpose = zlib.crc32(f"{seed} {purpose}".encode())
    reseed(states, of_purpose, number, replica)
    with own(states, of_purpose, number, replica, replicas):
        yield


def _key(seed: int, number: int, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    key = tf.constant([seed & 0x7FFFFFFF, number], tf.int32)
    for part in (tf.cast(step, tf.int32), replica):
        key = tf.random.experimental.stateless_fold_in(key, part)
    return key
