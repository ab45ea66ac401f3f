"""Clock readings inside compiled steps, ordered with the computations that they measure."""

from typing import Any

import tensorflow as tf


def time_after(tensors: Any) -> tf.Tensor:
    """Returns the time at which all tensors of a structure are available: a scalar float64, in seconds since the epoch."""
    with tf.control_dependencies([x for x in tf.nest.flatten(tensors) if tf.is_tensor(x)]):
        return tf.timestamp()


def available_after(time: tf.Tensor, tensors: Any) -> Any:
    """Returns the same tensors, available only after this reading of the clock.

    Otherwise the clock may be read late, when the first computation with them frees a thread.
    """
    with tf.control_dependencies([time]):
        return tf.nest.map_structure(lambda x: None if x is None else tf.identity(x), tensors, expand_composites=True)
