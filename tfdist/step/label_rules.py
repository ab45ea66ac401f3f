"""Rules for labels: one function for each way in which they do not fit the loss and the model's outputs, and a table."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

_SPARSE = "sparse_categorical_crossentropy"
_CATEGORICAL = ("categorical_crossentropy", "categorical_focal_crossentropy")
_BINARY = ("binary_crossentropy", "binary_focal_crossentropy")
_PROBABILITIES = {**dict.fromkeys((_SPARSE, *_CATEGORICAL), "softmax"), **dict.fromkeys(_BINARY, "sigmoid")}


class Finding(NamedTuple):
    """What a rule has found.

    Attributes:
      text: what was found, why it matters, and what to do.
      is_error: whether training is certainly wrong; otherwise it is only suspicious.
    """

    text: str
    is_error: bool = False


class Labels(NamedTuple):
    """The labels of one output, with the loss that takes them.

    Attributes:
      name: how messages call them.
      shape: shape of one example's labels; None for an unknown dim.
      dtype: name of their dtype.
      values: [rows, ...], the labels of some examples; None if only their form is known.
      weights: [rows, ...], weights of these examples; None if all count equally.
      loss: name of the Keras loss; "" for any other.
      options: arguments of the loss.
      outputs: shape of the model's output for one example; None if it is not known.
      activation: name of the activation with which the output ends; None if it is not known.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    values: np.ndarray | None
    weights: np.ndarray | None
    loss: str
    options: Mapping[str, Any]
    outputs: tuple[int | None, ...] | None
    activation: str | None

    @property
    def classes(self) -> int | None:
        """Number of classes for which the output has a value; None if it is not known."""
        return self.outputs[-1] if self.outputs else None


def _strings(labels: Labels) -> Finding | None:
    if labels.dtype != "string":
        return None
    return Finding(
        f"Labels must be numbers. Received: {labels.name} of strings. Number the classes from 0, for example by "
        "keras.layers.StringLookup(num_oov_indices=0) or numpy.unique(y, return_inverse=True).",
        is_error=True,
    )


def _one_hot(labels: Labels) -> Finding | None:
    classes = labels.classes
    if labels.loss != _SPARSE or not classes or classes == 1 or labels.outputs != labels.shape:
        return None
    return Finding(
        f"{_SPARSE} takes one class number for each example. Received: {labels.name} of shape {_shape(labels.shape)}, like "
        f"the model's outputs, as if it were one-hot. Use categorical_crossentropy, or numpy.argmax(y, -1) as labels.",
        is_error=True,
    )


def _class_numbers(labels: Labels) -> Finding | None:
    classes = labels.classes
    if labels.loss not in _CATEGORICAL or not classes or classes == 1 or labels.outputs is None:
        return None
    if labels.shape not in (labels.outputs[:-1], (*labels.outputs[:-1], 1)):
        return None
    return Finding(
        f"{labels.loss} takes one-hot labels. Received: {labels.name} of shape {_shape(labels.shape)}, one number for each "
        f"example, for {classes} outputs. Use {_SPARSE}, or keras.utils.to_categorical(y, {classes}) as labels.",
        is_error=True,
    )


def _out_of_range(labels: Labels) -> Finding | None:
    values, classes = labels.values, labels.classes
    if labels.loss != _SPARSE or values is None or not classes or not np.issubdtype(values.dtype, np.number):
        return None
    values = (
        values[values != labels.options["ignore_class"]] if labels.options.get("ignore_class") is not None else values
    )
    values = values[np.isfinite(values)]
    wrong = values[(values < 0) | (values >= classes)]
    if not wrong.size:
        return None
    starts_at_one = values.min() == 1 and values.max() == classes
    remedy = "Subtract 1 from the labels" if starts_at_one else _more_units(wrong, values)
    worst = wrong.max() if wrong.max() >= classes else wrong.min()
    return Finding(
        f"Labels must be in 0..{classes - 1}, because the model has {classes} outputs. Received: {labels.name} with "
        f"{worst:g} ({wrong.size} of {values.size} labels are out of range). {remedy}.",
        is_error=True,
    )


def _more_units(wrong: np.ndarray, values: np.ndarray) -> str:
    if wrong.min() < 0:
        return "Number the classes from 0, or name the label to leave out by the loss's ignore_class"
    return f"Give the model's last layer {int(values.max()) + 1} units, or number the classes from 0"


def _no_probabilities(labels: Labels) -> Finding | None:
    values = labels.values
    if labels.loss not in _BINARY or values is None or not np.issubdtype(values.dtype, np.number):
        return None
    if labels.weights is not None:
        if labels.weights.shape != values.shape[: labels.weights.ndim]:
            return None
        values = values[labels.weights != 0]
    values = values[np.isfinite(values)]
    if not values.size or (values.min() >= 0 and values.max() <= 1):
        return None
    if values.min() == -1 and values.max() == 1:
        remedy = "Use (y + 1) / 2 as labels, or the hinge loss"
    else:
        remedy = f"For class numbers, use {_SPARSE} and one output per class; for other numbers, mean_squared_error"
    return Finding(
        f"{labels.loss} takes labels in 0..1. Received: {labels.name} in {values.min():g}..{values.max():g}. {remedy}.",
        is_error=True,
    )


def _not_finite(labels: Labels) -> Finding | None:
    values = labels.values
    if values is None or not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all():
        return None
    rows = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).sum())
    return Finding(
        f"The labels {labels.name} are NaN or inf in {rows} of {len(values)} examples checked, so the loss will be "
        "too. Remove these examples, or give them sample_weight=0 and any number as label."
    )


def _normalized_twice(labels: Labels) -> Finding | None:
    if not labels.options.get("from_logits") or labels.activation != _PROBABILITIES.get(labels.loss):
        return None
    return Finding(
        f"The model ends in {labels.activation}, but {labels.loss} has from_logits=True, for outputs without it. Leave one of "
        f"them out: the loss is computed from the values before {labels.activation} only where Keras finds them."
    )


def _never_normalized(labels: Labels) -> Finding | None:
    expected = _PROBABILITIES.get(labels.loss)
    if expected is None or labels.options.get("from_logits") or labels.activation != "linear":
        return None
    return Finding(
        f"The model ends without an activation, but {labels.loss} has from_logits=False and expects probabilities: the "
        f"loss is not that of a classifier. Give the loss from_logits=True, or the last layer activation='{expected}'."
    )


RULES: tuple[Callable[[Labels], Finding | None], ...] = (
    _strings,
    _one_hot,
    _class_numbers,
    _out_of_range,
    _no_probabilities,
    _not_finite,
    _normalized_twice,
    _never_normalized,
)


def _shape(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
