"""Class weights: sample weights that depend on an example's label."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfdist.data.examples import Element, Examples
from tfdist.data.pipeline import reweighted
from tfdist.errors import InputError


def with_class_weight(source: Examples, class_weight: Mapping[int, float]) -> Examples:
    """The same examples, each one's sample weight multiplied by the weight of its class.

    Args:
      source: its y must be one integer tensor: a label for each example, [n] or [n, 1], or for each token, [n, length].
      class_weight: weights, at least 0, by class, at least 0; a class that is not in it weighs 1.

    Raises:
      InputError: labels are not integers, or a class or a weight is negative.
    """
    wrong = {label: weight for label, weight in class_weight.items() if label < 0 or not 0 <= weight < np.inf}
    if wrong or not class_weight:
        raise InputError(
            f"Class weights must be finite and at least 0, classes too. Received: {wrong or class_weight}."
        )
    labels = source.element_spec[1]
    if not (isinstance(labels, tf.TensorSpec) and labels.dtype.is_integer):
        raise InputError(f"Class weights need one integer label for each example. Received: y of {labels}.")
    table = np.ones(max(class_weight) + 2, np.float32)  # the last entry is for all classes that are not named
    table[list(class_weight)] = list(class_weight.values())

    def weigh(*element: tf.Tensor) -> Element:
        label = tf.cast(element[1], tf.int64)
        if label.shape.rank > 1 and label.shape[-1] == 1:
            label = tf.squeeze(label, -1)
        named = (label >= 0) & (label < len(table) - 1)
        return reweighted(element, tf.gather(table, tf.where(named, label, len(table) - 1)))

    return source.map(weigh)
