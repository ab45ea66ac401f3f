"""Class weights: sample weights that depend on an example's label."""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.examples import Element, Examples
from tfdist.errors import InputError


def with_class_weight(source: Examples, class_weight: Mapping[int, float], one_hot: bool | None = None) -> Examples:
    """Returns the same examples, with sample weights multiplied by the weight of their class.

    Args:
      source: examples whose y is one tensor of class numbers, which are rounded: a number per example, [n] or [n, 1], or per
        token, [n, length]; or of vectors [n, classes], whose largest element is the class.
      class_weight: finite weights, at least 0, by class, at least 0; other classes have weight 1.
      one_hot: whether y of more than one dim, of which the last is not 1, has vectors; by default, if it is floating-point.

    Raises:
      InputError: y is not one tensor of numbers, or a class or a weight is negative.
    """
    wrong = {label: weight for label, weight in class_weight.items() if label < 0 or not 0 <= weight < np.inf}
    if wrong or not class_weight:
        raise InputError(f"Classes and class weights must be finite and at least 0. Received: {wrong or class_weight}.")
    labels = source.element_spec[1]
    if not isinstance(labels, tf.TensorSpec) or labels.dtype in (tf.string, tf.variant) or labels.dtype.is_complex:
        raise InputError(
            f"Class weights need one label for each example, a number or a one-hot vector. Received: y of {labels}. Give "
            "sample weights."
        )
    has_vectors = labels.dtype.is_floating if one_hot is None else one_hot
    table = np.ones(max(class_weight) + 2, keras.config.floatx())  # the last entry is for all other classes
    table[list(class_weight)] = list(class_weight.values())

    def weigh(*element: tf.Tensor) -> Element:
        label = _class_numbers(element[1], has_vectors)
        named = (label >= 0) & (label < len(table) - 1)
        return _reweighted(element, tf.gather(table, tf.where(named, label, len(table) - 1)))

    return source.map(weigh)


def _class_numbers(labels: tf.Tensor, has_vectors: bool) -> tf.Tensor:
    """Returns the class numbers, int64, of labels that are numbers or vectors."""
    if labels.dtype == tf.bool:
        labels = tf.cast(labels, tf.int64)
    if labels.shape.rank > 1 and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    elif labels.shape.rank > 1 and has_vectors:
        return tf.argmax(labels, axis=-1)
    return tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int64)


def _reweighted(element: Element, factor: tf.Tensor) -> Element:
    """Multiplies a batch's sample weights (1 if it has none) by `factor`, which has the shape of the labels.

    A product has the larger of the two shapes, and the weight's dtype if that is floating.
    """
    x, y, *rest = element
    return x, y, tf.nest.map_structure(lambda weight: _product(weight, factor), rest[0]) if rest else factor


def _product(weight: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    weight = weight if weight.dtype.is_floating else tf.cast(weight, factor.dtype)
    rank = max(weight.shape.rank, factor.shape.rank)
    weight, factor = _with_rank(weight, rank), _with_rank(factor, rank)
    return weight * tf.cast(factor, weight.dtype)


def _with_rank(tensor: tf.Tensor, rank: int) -> tf.Tensor:
    for _ in range(rank - tensor.shape.rank):
        tensor = tensor[..., None]
    return tensor
