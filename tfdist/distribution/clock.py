"""Clock readings inside compiled steps, ordered with the computations that they measure."""

from typing import Any

import tensorflow as tf


def time_after(tensors: Any) -> tf.Tensor:
    """Returns the time, in seconds since the epoch, at which all tensors of a structure are available; a scalar float64."""
    with tf.control_dependencies([x for x in tf.nest.flatten(tensors) if tf.is_tensor(x)]):
        return tf.timestamp()


def available_after(time: tf.Tensor, tensors: Any) -> Any:
    """Returns the same tensors, for computations that begin after this reading of the clock.

    Otherwise the clock is read when the first of them leaves a thread to it, perhaps at the end of a long convolution.
    """
    with tf.control_dependencies([time]):
        return tf.nest.map_structure(lambda x: None if x is None else tf.identity(x), tensors, expand_composites=True)
