"""Prevents constant folding of operations that communicate, which TensorFlow assumes to have no side effects."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist import keras_internals


def hide_constant(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with the same elements that graph optimization cannot fold; a scalar becomes a vector of one.

    TensorFlow assumes that Horovod's operations have no side effects: it would all-reduce a constant once, during graph
    optimization, and the other ranks would wait for this rank at their next step. The result is therefore a slice of the
    full tensor, without a copy, that begins at a random index below 1. (Alternatives do not work: an operation without
    side effects, such as a placeholder with a default, is hoisted out of a loop. Clocks, unlike random numbers, run in the
    order of their creation: a message would wait for everything that was timed before.)
    """
    if tf.executing_eagerly() or tensor.shape.rank is None:
        return tensor
    if tensor.shape.rank == 0:
        tensor = tf.reshape(tensor, [1])
    return tf.slice(
        tensor, tf.fill([tensor.shape.rank], runtime_zero()), [-1 if d is None else d for d in tensor.shape]
    )


def runtime_zero() -> tf.Tensor:
    """Returns a scalar int32 zero that graph optimization cannot fold; operations on it run at run time."""
    with tf.device("CPU:0"):  # a slice expects its begin index on the host
        return tf.raw_ops.RandomUniformInt(shape=tf.constant([], tf.int32), minval=0, maxval=1, seed=1, seed2=1)


def wait_for_tensors(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a scalar int32 zero that is computed from the tensors by an operation that always runs.

    TensorFlow prunes operations without side effects unless their values are used; a control dependency is not enough.
    """
    if tf.executing_eagerly() or not tensors:
        return tf.constant(0)
    elements = [tf.cast(tf.reshape(tensor, [-1])[:1], tf.bool) for tensor in tensors]
    with tf.device("CPU:0"):
        upper_bound = tf.minimum(1 + tf.cast(tf.reduce_any(tf.concat(elements, 0)), tf.int32), 1)
        zero = tf.raw_ops.RandomUniformInt(
            shape=tf.constant([], tf.int32), minval=0, maxval=upper_bound, seed=1, seed2=1
        )
    return keras_internals.always_run(zero)
