"""Random layers as a pure function of (seed, step, replica): masks differ between replicas and repeat exactly."""

from collections.abc import Sequence

import keras
import tensorflow as tf


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
        key = tf.constant([seed & 0x7FFFFFFF, i], tf.int32)
        for number in (tf.cast(step, tf.int32), replica):
            key = tf.random.experimental.stateless_fold_in(key, number)
        state.assign(tf.cast(tf.abs(key), state.dtype))
