"""Checks whether some examples fit the model and its losses before training.

If labels do not fit, Keras and TensorFlow compute wrong values or NaN, or fail with a message that lists arrays and files
of the libraries.
"""

import contextlib
import os
import pathlib
import re
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError, TfdistError, error_cause, error_summary, nested_input_error, one_line, truncate
from tfdist.step.loss import value_at_path

_CAST = re.compile(r"Cast \w+ to \w+ is not supported")  # other unimplemented operations are not caused by the data
_PARTS = ("x", "y", "sample_weight")
_KERAS, _TENSORFLOW = (str(pathlib.Path(library.__file__).parent) + os.sep for library in (keras, tf))
_LIBRARIES = (_KERAS, _TENSORFLOW)
_ROOT = pathlib.Path(__file__).parents[2]
_TFDIST = tuple(str(_ROOT / package) + os.sep for package in ("tfdist", "strategies"))
_WRAPPERS = tuple(str(_ROOT / "tfdist" / package) + os.sep for package in ("keras_internals", "pipelining"))
_PYTHON = (threading.__file__, contextlib.__file__)  # between a strategy and the functions that it calls
_NON_MODEL_OPERATIONS = re.compile(r"IteratorGetNext|PyFunc")  # operations that read data or run Python code
_XLA = re.compile(r"[^\n]*\bXLA_\w+_JIT\b[^\n]*|[^\n]*\btf2xla\b[^\n]*")
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
# Words in errors caused by data that does not fit. Other errors are bugs and are raised unchanged.
_DATA_ERROR_WORDS = re.compile(
    r"shape|rank|dim|size|dtype|type|cast|incompatible|compatible|broadcast|label|input|structure|outputs|range|bound|argument",
    re.IGNORECASE,
)
_ENGINE_ERROR_WORDS = re.compile(r"Distributed\w*Variable|replica context|strategy\.scope|SymbolicTensor")
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")  # methods a model may override
_LOCATION = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)


@contextlib.contextmanager
def explain_mismatch(element_spec: Any) -> Iterator[None]:
    """Context that converts errors of Keras or TensorFlow about shapes, dtypes or labels to `InputError`.

    An error is raised unchanged if no Keras code was running (reading data, compressing gradients), or if user code
    such as a layer or a loss function raised it, since its traceback is more helpful. `element_spec` is a structure
    (x,), (x, y) or (x, y, sample_weight) of `tf.TensorSpec`, of one example.
    """
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        if isinstance(error, tf.errors.UnimplementedError) and not _CAST.search(error.message):
            raise
        if input_error := nested_input_error(error):
            raise input_error from error
        if xla_message := _XLA.search(str(error)):
            raise compilation_error(xla_message[0]) from error
        locations = _graph_locations(error) if isinstance(error, tf.errors.OpError) else _locations(error)
        is_in_keras = any(path.startswith(_KERAS) for path, _ in locations) and locations[-1][0].startswith(_LIBRARIES)
        if isinstance(error, TfdistError) or not is_in_keras or _is_in_overridden_step(error):
            raise
        if not _DATA_ERROR_WORDS.search(str(error)) or _ENGINE_ERROR_WORDS.search(str(error)):
            raise
        parts = [f"{name} {_describe_specs(part)}" for name, part in zip(_PARTS, element_spec, strict=False)]
        if match := _LABEL.search(error_cause(error)):  # the rest of the message lists all labels of the batch
            raise InputError(
                f"Labels must be in 0..{int(match[2]) - 1}, because the model's output has {match[2]} classes. Received: "
                f"{match[1]}. Number the classes from 0, or increase the units of the model's last layer.{_notes(error)}"
            ) from error
        raise InputError(
            f"Model, loss and metrics must fit the data. Received: examples with {', '.join(parts)}; "
            f"{error_summary(error)}{_user_code(locations)}. Change the model, --loss or --metrics, or the data."
            f"{_notes(error)}"
        ) from error


def compilation_error(cause: str) -> InputError:
    """Returns the error for a step that XLA cannot compile, with the cause."""
    return InputError(
        "--jit_compile requires a forward and backward pass that XLA can compile and that does not communicate (synchronized "
        f"BatchNorm and masked losses do). Received: {truncate(one_line(cause))} Remove --jit_compile, or change the "
        "model."
    )


def _locations(error: BaseException) -> list[tuple[str, str]]:
    """Returns the file and line of each call, innermost last, except wrappers around Keras methods."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, str(f.lineno)) for f in frames if not f.filename.startswith(_WRAPPERS)]


def _graph_locations(error: tf.errors.OpError) -> list[tuple[str, str]]:
    """Returns the locations that created the failed operation; empty if it is not an operation of the model."""
    if _NON_MODEL_OPERATIONS.search(error.message):
        return []
    return [(f"{os.sep}{path.lstrip(os.sep)}", line) for path, line in _LOCATION.findall(error.message)]


def _is_in_overridden_step(error: BaseException) -> bool:
    """Returns whether a step that the model overrides raised the error; its author should see it unchanged."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in _STEPS and not frame.filename.startswith((*_LIBRARIES, *_TFDIST)) for frame in frames)


def _describe_specs(specs: Any) -> str:
    text = keras.tree.map_structure(lambda spec: f"{spec.dtype.name}{list(spec.shape)}", specs)
    return str(text).replace("'", "")


def _user_code(locations: list[tuple[str, str]]) -> str:
    """Returns the innermost location in user code, such as a custom layer, in parentheses; "" if there is none."""
    known = (*_LIBRARIES, *_TFDIST, *_PYTHON)
    return next((f" ({path}, line {line})" for path, line in reversed(locations) if not path.startswith(known)), "")


def _notes(error: BaseException) -> str:
    return "".join(f" {note}" for note in getattr(error, "__notes__", ()))


_SPARSE = "sparse_categorical_crossentropy"
_CATEGORICAL = ("categorical_crossentropy", "categorical_focal_crossentropy")
_BINARY = ("binary_crossentropy", "binary_focal_crossentropy")
_PROBABILITIES = {**dict.fromkeys((_SPARSE, *_CATEGORICAL), "softmax"), **dict.fromkeys(_BINARY, "sigmoid")}


class Finding(NamedTuple):
    """A problem in the data."""

    text: str  # the problem, its effect and the remedy
    is_error: bool = False  # whether the result of training is certainly wrong; otherwise it may be


class Labels(NamedTuple):
    """The labels of one output, and their loss."""

    name: str  # name in messages
    shape: tuple[int | None, ...]  # shape of one example's labels; None for an unknown dim
    dtype: str  # name of their dtype
    loss: str  # name of the Keras loss; "" for any other loss
    options: Mapping[str, Any]  # arguments of the loss
    values: np.ndarray | None = None  # [rows, ...]; labels of some examples; None if only shape and dtype are known
    weights: np.ndarray | None = None  # [rows, ...]; weights of these examples; None if all have the same weight
    outputs: tuple[int | None, ...] | None = None  # shape of the model's output for one example; None if unknown
    activation: str | None = None  # name of the output's last activation; None if unknown

    @property
    def classes(self) -> int | None:
        """Number of classes in the output; None if unknown."""
        return self.outputs[-1] if self.outputs else None


def _label_findings(labels: Labels) -> Iterator[Finding]:
    yield from _shape_findings(labels)
    if labels.values is not None and np.issubdtype(labels.values.dtype, np.number):
        yield from _value_findings(labels, labels.values)
    yield from _normalization_findings(labels)


def _shape_findings(labels: Labels) -> Iterator[Finding]:
    if labels.dtype == "string":
        yield Finding(
            f"Labels must be numbers. Received: {labels.name}, which has strings. Number the classes from 0, for example with "
            "keras.layers.StringLookup(num_oov_indices=0) or numpy.unique(y, return_inverse=True).",
            is_error=True,
        )
    outputs, classes = labels.outputs or (), labels.classes
    if not classes or classes == 1:
        return
    if labels.loss == _SPARSE and outputs == labels.shape:
        yield Finding(
            f"{_SPARSE} takes one class index for each example. Received: {labels.name} of shape {_shape(labels.shape)}, like "
            f"the model's outputs, as if it were one-hot. Use categorical_crossentropy, or numpy.argmax(y, -1) as labels.",
            is_error=True,
        )
    if labels.loss in _CATEGORICAL and labels.shape in (outputs[:-1], (*outputs[:-1], 1)):
        yield Finding(
            f"{labels.loss} takes one-hot labels. Received: {labels.name} of shape {_shape(labels.shape)}, one number for each "
            f"example, for {classes} outputs. Use {_SPARSE}, or keras.utils.to_categorical(y, {classes}) as labels.",
            is_error=True,
        )


def _value_findings(labels: Labels, values: np.ndarray) -> Iterator[Finding]:
    ignored_class = labels.options.get("ignore_class")
    finite_values = values[np.isfinite(values)]
    if labels.loss == _SPARSE and labels.classes:
        class_numbers = finite_values if ignored_class is None else finite_values[finite_values != ignored_class]
        invalid_values = class_numbers[(class_numbers < 0) | (class_numbers >= labels.classes)]
        if invalid_values.size:
            if class_numbers.min() == 1 and class_numbers.max() == labels.classes:
                remedy = "Subtract 1 from the labels"
            elif invalid_values.min() < 0:
                remedy = "Number the classes from 0, or pass the label to ignore to the loss as ignore_class"
            else:
                units = int(class_numbers.max()) + 1
                remedy = f"Create the model's last layer with {units} units, or number the classes from 0"
            worst = invalid_values.max() if invalid_values.max() >= labels.classes else invalid_values.min()
            yield Finding(
                f"Labels must be in 0..{labels.classes - 1}, because the model's output has {labels.classes} classes. "
                f"Received: {labels.name} with {worst:g} ({invalid_values.size} of {class_numbers.size} labels are out of "
                f"range). {remedy}.",
                is_error=True,
            )
    weights = labels.weights
    if labels.loss in _BINARY and (weights is None or weights.shape == values.shape[: weights.ndim]):
        counted_values = values if weights is None else values[weights != 0]
        counted_values = counted_values[np.isfinite(counted_values)]
        low, high = (counted_values.min(), counted_values.max()) if counted_values.size else (0, 1)
        remedy = f"For class indices, use {_SPARSE} and one output per class; for other numbers, use mean_squared_error"
        if low == -1 and high == 1:
            remedy = "Use (y + 1) / 2 as labels, or the hinge loss"
        if low < 0 or high > 1:
            received = f"{labels.name} in {low:g}..{high:g}"
            yield Finding(f"{labels.loss} takes labels in 0..1. Received: {received}. {remedy}.", is_error=True)
    if finite_values.size < values.size:
        rows = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).sum())
        yield Finding(
            f"The labels {labels.name} are NaN or inf in {rows} of {len(values)} examples checked, so the loss will be "
            "NaN or inf. Remove these examples, or set their sample_weight to 0 and their labels to any number."
        )


def _normalization_findings(labels: Labels) -> Iterator[Finding]:
    activation, from_logits = _PROBABILITIES.get(labels.loss), labels.options.get("from_logits")
    if from_logits and labels.activation == activation:
        yield Finding(
            f"The model ends in {labels.activation}, but {labels.loss} has from_logits=True, for outputs without it. Remove "
            f"one of them: the loss is computed from the values before {labels.activation} only if Keras finds these values."
        )
    if activation is not None and not from_logits and labels.activation == "linear":
        yield Finding(
            f"The model ends without an activation, but {labels.loss} has from_logits=False and expects probabilities: the "
            f"loss is wrong. Set from_logits=True in the loss, or activation='{activation}' in the last layer."
        )


def _shape(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


_MAX_COLUMNS = 3  # maximum number of columns listed in a message
_MAX_BYTE = 255
_MIN_BYTE_PEAK = 64  # images scaled to [0, 1] or [-1, 1] have smaller values


def _non_finite_location(name: str, values: np.ndarray) -> str:
    """Returns the location of NaN or inf: "x", or "column 3 of x" if the data is a table; "" if there is none."""
    if not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all():
        return ""
    if values.ndim != 2 or values.shape[1] == 1:
        return name
    columns = [str(column) for column in np.flatnonzero(~np.isfinite(values).all(axis=0))]
    if len(columns) > _MAX_COLUMNS:
        return f"{len(columns)} columns of {name}, such as {', '.join(columns[:_MAX_COLUMNS])}"
    if len(columns) == 1:
        return f"column {columns[0]} of {name}"
    return f"columns {', '.join(columns[:-1])} and {columns[-1]} of {name}"


def _input_findings(name: str, values: np.ndarray, is_scaled: bool) -> Iterator[Finding]:
    """Yields problems with inputs or weights; `is_scaled` indicates whether the model may scale them."""
    if location := _non_finite_location(name, values):
        rows = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).sum())
        kinds = [name for name, is_kind in (("NaN", np.isnan(values)), ("inf", np.isinf(values))) if is_kind.any()]
        yield Finding(
            f"There is {' and '.join(kinds)} in {location}, in {rows} of the {len(values)} examples checked: the loss and "
            "the weights become NaN. Remove these examples, or replace the values, for example by the column's mean."
        )
        return
    is_image = values.ndim in (3, 4) and (values.dtype == np.uint8 or np.issubdtype(values.dtype, np.floating))
    if is_scaled or not is_image or values.min() < 0 or (values != np.round(values)).any():
        return
    if _MIN_BYTE_PEAK < values.max() <= _MAX_BYTE:
        yield Finding(
            f"{name} has values from 0 to {values.max():g}, like bytes of images, and no layer of the model scales them: "
            "training is slow, or diverges. Divide by 255, or begin the model with keras.layers.Rescaling(1 / 255)."
        )


_SCALING = (
    keras.layers.BatchNormalization,
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
    keras.layers.Normalization,
    keras.layers.Rescaling,
    keras.layers.Lambda,
)


def spec_findings(model: keras.Model, element_spec: Any) -> list[Finding]:
    """Returns problems with the shapes and dtypes of a compiled model's labels, before it is built.

    `element_spec` is a structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec`, of one example.
    """
    specs, losses = _flatten(element_spec[1], "y"), keras_internals.user_losses(model)
    outputs = getattr(model, "outputs", None) or []
    if not len(specs) == len(losses) == len(outputs) == 1:  # losses are matched to labels only after they are built
        losses, outputs = [None] * len(specs), [None]
    all_labels = [_labels(*leaf, loss, outputs[0]) for leaf, loss in zip(specs, losses, strict=True)]
    return [finding for labels in all_labels for finding in _label_findings(labels)]


def findings(model: keras.Model, examples: Any) -> list[Finding]:
    """Returns the problems that some examples cause for a compiled and built model.

    `examples` is a structure (x, y) or (x, y, sample_weight) of arrays [rows, ...].
    """
    x, y, *weights = examples
    is_scaled = _may_scale(model)
    results = [finding for leaf in _flatten(x, "x") for finding in _input_findings(*leaf, is_scaled)]
    for name, array in _flatten(weights[0], "sample_weight") if weights else ():
        results += _input_findings(name, array, is_scaled=True)
    for labels in _labels_by_output(model, y, weights[0] if weights else None):
        results += _label_findings(labels)
    return results


def non_finite_locations(examples: Any) -> list[str]:
    """Returns the locations of NaN and inf in (x, y) or (x, y, sample_weight), such as "x" or "column 3 of x"."""
    leaves = [leaf for name, part in zip(_PARTS, examples, strict=False) for leaf in _flatten(part, name)]
    return [location for leaf in leaves if (location := _non_finite_location(*leaf))]


def _labels_by_output(model: keras.Model, y: Any, weights: Any) -> Iterator[Labels]:
    """Yields the labels of each output that has a loss."""
    names, losses = [name for name, _ in _flatten(y, "y")], keras_internals.flat_losses(model)
    outputs = getattr(model, "outputs", None) or [None] * len(losses)
    if not losses or len(outputs) != len(losses) or len(keras.tree.flatten(y)) != len(losses):
        return  # some or all outputs have no loss
    labels_by_path, outputs_by_path = keras_internals.match_structures(model, y, outputs)
    names_by_path, _ = keras_internals.match_structures(model, keras.tree.pack_sequence_as(y, names), outputs)
    shared_weights = None if keras.tree.is_nested(weights) else weights
    for path, loss, _ in losses:
        name, values, output = (value_at_path(part, path) for part in (names_by_path, labels_by_path, outputs_by_path))
        yield _labels(name, values, loss, output)._replace(values=values, weights=shared_weights)


def _labels(name: str, values: Any, loss: Any, output: keras.KerasTensor | None) -> Labels:
    """Returns labels without values; `values` is a `tf.TensorSpec` of one example or an array [rows, ...]."""
    shape = tuple(values.shape) if isinstance(values, tf.TensorSpec) else tuple(values.shape[1:])
    loss_name, options = keras_internals.loss_form(loss) if loss is not None else ("", {})
    labels = Labels(name, shape, values.dtype.name, loss_name, options)
    if output is None:
        return labels
    return labels._replace(outputs=tuple(output.shape[1:]), activation=keras_internals.last_activation(output))


def _may_scale(model: keras.Model) -> bool:
    """Returns whether a model may scale its inputs, in a layer, an operation or its own code."""
    has_layers_only = all(isinstance(operation, keras.Layer) for operation in getattr(model, "operations", ()))
    is_known = bool(getattr(model, "outputs", None)) and has_layers_only
    layers: Sequence[keras.Layer] = keras_internals.layers_of(model)
    return not is_known or any(isinstance(layer, _SCALING) for layer in layers)


def _flatten(structure: Any, name: str) -> list[tuple[str, Any]]:
    """Returns the leaves of a structure, with names such as x["age"]."""
    leaves = keras.tree.flatten_with_path(structure)
    keys = [[f'["{key}"]' if isinstance(key, str) else f"[{key}]" for key in path] for path, _ in leaves]
    return [(name + "".join(path_keys), leaf) for path_keys, (_, leaf) in zip(keys, leaves, strict=True)]


def as_arrays(element: Any) -> Any:
    """Converts a structure of tensors to arrays."""
    return tf.nest.map_structure(np.asarray, element)
