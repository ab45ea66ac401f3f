"""Checks some examples against the model and its losses before training, by the tables of rules.

Keras and TensorFlow compute garbage or NaN from labels that do not fit, or fail in an operation whose message contains
arrays and files of the library.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.step import input_rules, label_rules
from tfdist.step.input_rules import Inputs
from tfdist.step.label_rules import Finding, Labels
from tfdist.step.loss import at_path

_SCALING = (
    keras.layers.BatchNormalization,
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
    keras.layers.Normalization,
    keras.layers.Rescaling,
    keras.layers.Lambda,
)


def findings_of_form(model: keras.Model, element_spec: Any) -> list[Finding]:
    """Returns what is wrong with the shapes and dtypes of labels, before the model is built.

    Args:
      model: compiled model.
      element_spec: structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec`, of one example.
    """
    specs = _flat(element_spec[1], "y")
    losses = keras_internals.user_losses(model)
    outputs = getattr(model, "outputs", None) or []
    if len(specs) == len(losses) == len(outputs) == 1:
        found = [_labels(name, spec, loss, outputs[0]) for (name, spec), loss in zip(specs, losses, strict=True)]
    else:  # which loss takes which labels is known once the losses are built
        found = [_labels(name, spec, None, None) for name, spec in specs]
    return [finding for labels in found for finding in _applied(labels)]


def findings(model: keras.Model, examples: Any) -> list[Finding]:
    """Returns what is wrong with, or suspicious about, some examples.

    Args:
      model: compiled and built model.
      examples: structure (x, y) or (x, y, sample_weight) of arrays [rows, ...].
    """
    x, y, *weights = examples
    scales = _may_scale(model)
    found = [finding for name, array in _flat(x, "x") for finding in input_rules.findings(Inputs(name, array, scales))]
    for name, array in _flat(weights[0], "sample_weight") if weights else ():
        found += input_rules.findings(Inputs(name, array, True))
    for labels in _labels_of(model, y, weights[0] if weights else None):
        found += _applied(labels)
    return found


def not_finite(examples: Any) -> list[str]:
    """Returns where in (x, y) or (x, y, sample_weight) there is NaN or inf, as in `input_rules.where_not_finite`."""
    named = zip(("x", "y", "sample_weight"), examples, strict=False)
    arrays = [each for name, part in named for each in _flat(part, name)]
    places = [input_rules.where_not_finite(Inputs(name, array, True)) for name, array in arrays]
    return [place for place in places if place]


def _applied(labels: Labels) -> Iterator[Finding]:
    yield from (found for rule in label_rules.RULES if (found := rule(labels)))


def _labels_of(model: keras.Model, y: Any, weights: Any) -> Iterator[Labels]:
    """Yields the labels of each output that has a loss."""
    names = keras.tree.pack_sequence_as(y, [name for name, _ in _flat(y, "y")])
    flat = keras_internals.flat_losses(model)
    outputs = getattr(model, "outputs", None) or [None] * len(flat)
    if not flat or len(outputs) != len(flat) or len(keras.tree.flatten(y)) != len(flat):
        return  # no output has a loss, or some have none
    by_path, outputs_by_path = keras_internals.matched(model, y, outputs)
    names_by_path, _ = keras_internals.matched(model, names, outputs)
    whole = None if keras.tree.is_nested(weights) else weights
    for path, loss, _ in flat:
        values = at_path(by_path, path)
        yield _labels(at_path(names_by_path, path), values, loss, at_path(outputs_by_path, path))._replace(
            values=values, weights=whole
        )


def _labels(name: str, values: Any, loss: Any, output: keras.KerasTensor | None) -> Labels:
    """Returns labels without values, of a `tf.TensorSpec` of one example or of an array [rows, ...]."""
    is_spec = isinstance(values, tf.TensorSpec)
    named, options = keras_internals.loss_form(loss) if loss is not None else ("", {})
    return Labels(
        name=name,
        shape=tuple(values.shape) if is_spec else tuple(values.shape[1:]),
        dtype=values.dtype.name,
        values=None,
        weights=None,
        loss=named,
        options=options,
        outputs=None if output is None else tuple(output.shape[1:]),
        activation=None if output is None else keras_internals.last_activation(output),
    )


def _may_scale(model: keras.Model) -> bool:
    is_known = bool(getattr(model, "outputs", None)) and not keras_internals.operations_beside_layers(model)
    layers: Sequence[keras.Layer] = keras_internals.layers_of(model)
    return not is_known or any(isinstance(layer, _SCALING) for layer in layers)


def _flat(structure: Any, name: str) -> list[tuple[str, Any]]:
    """Returns the leaves of a structure, with names such as x["age"]."""
    if isinstance(structure, dict):
        return [each for key in sorted(structure) for each in _flat(structure[key], f'{name}["{key}"]')]
    if isinstance(structure, tuple | list):
        return [each for number, part in enumerate(structure) for each in _flat(part, f"{name}[{number}]")]
    return [(name, structure)]


def as_arrays(element: Any) -> Any:
    """Returns a structure of tensors as arrays."""
    return tf.nest.map_structure(np.asarray, element)
