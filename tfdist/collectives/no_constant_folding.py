"""What TensorFlow's optimizer of graphs must not know: operations that communicate are without effects to it."""

import tensorflow as tf


def not_constant(tensor: tf.Tensor) -> tf.Tensor:
    """The same elements, of which a graph's optimizer cannot know that they are constant; a scalar becomes a vector of one.

    To TensorFlow, Horovod's operations have no effect beside their result: it would communicate a constant once, while it
    optimizes the graph, and never again. The other ranks would wait for this one at their next step. So this is a slice of
    everything, which copies nothing, from a random place below 1. (What has no effects, like a place that might be fed, is
    taken out of a loop. A clock stays in, but clocks run in the order of their making, which random numbers do not: a
    message would wait for whatever was timed before.)
    """
    if tf.executing_eagerly() or tensor.shape.rank is None:
        return tensor
    if tensor.shape.rank == 0:
        tensor = tf.reshape(tensor, [1])
    return tf.slice(
        tensor, tf.fill([tensor.shape.rank], zero_when_run()), [-1 if d is None else d for d in tensor.shape]
    )


def zero_when_run() -> tf.Tensor:
    """A scalar int32 zero, of which a graph's optimizer does not know that it is one: what depends on it is computed."""
    with tf.device("CPU:0"):  # where a slice wants its place
        return tf.raw_ops.RandomUniformInt(shape=tf.constant([], tf.int32), minval=0, maxval=1, seed=1, seed2=1)
