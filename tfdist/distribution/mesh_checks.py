"""Rejects calls of a model on a mesh outside of replica functions, and operations on which DTensor fails."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.distribution.strategy import in_replica_function
from tfdist.errors import InputError


@functools.cache
def reject_calls_outside_replica_functions() -> None:
    """Makes calls of layers with weights on a mesh raise `InputError` outside of replica functions.

    Building a model, and the user's own functions with DTensors, are not affected.
    """
    keras_internals.check_layer_calls(_check_call)


def _check_call(layer: keras.Layer, inputs: Sequence[Any]) -> None:
    if in_replica_function() or any(_may_be_on_mesh(x) for x in inputs):
        return
    # A compiled model may not have been built in the scope, where its optimizer was created.
    optimizer = layer.optimizer if isinstance(layer, keras.Model) and layer.compiled else None
    variables = [*layer.weights, *(optimizer.variables if optimizer is not None else [])]
    if any(isinstance(keras_internals.value_of(variable), dtensor.DVariable) for variable in variables):
        raise InputError(
            "A model on a mesh can be called only in replica functions. Received: a call of "
            f"{layer.name} outside of one. Call tfdist.distribute(model) before its fit, evaluate, predict and ..._on_batch "
            "(instead of model(x), use predict_on_batch), or use tfdist.Trainer."
        )


def _may_be_on_mesh(x: Any) -> bool:
    """Returns whether an input is a DTensor, or an argument of a traced user function, which may be one."""
    if not isinstance(x, tf.Tensor):
        return False
    if hasattr(x, "numpy"):
        with tf.init_scope():
            return dtensor.is_dtensor(x)
    return x.op.type == "Placeholder" and not keras_internals.is_in_keras_function()


class _Rule(NamedTuple):
    """Rejects operations of `types` if `applies` returns True; `message` is a format with the fields `name` and `shapes`."""

    types: tuple[str, ...]
    applies: Callable[[tf.Operation], bool]
    message: str


def reject_unsafe_operations(graph: tf.Graph) -> None:
    """Raises `InputError` for an operation of a function, including nested ones, that DTensor cannot compile safely."""
    for operation in keras_internals.operations_of(graph):
        for rule in _RULES:
            if operation.type in rule.types and rule.applies(operation):
                shapes = [x.shape for x in operation.inputs]
                raise InputError(rule.message.format(name=operation.name, shapes=shapes))


def _has_unnamed_dims(operation: tf.Operation) -> bool:
    new_axes, ellipsis = operation.get_attr("new_axis_mask"), operation.get_attr("ellipsis_mask")
    rank, entries = operation.inputs[0].shape.rank, operation.inputs[1].shape[0]
    named_dims = (entries or 0) - new_axes.bit_count() - ellipsis.bit_count()
    is_after_ellipsis = ellipsis and new_axes & -new_axes > ellipsis  # x[..., None] does not crash
    return bool(new_axes) and (rank is None or named_dims < rank) and not is_after_ellipsis


def _has_strides(operation: tf.Operation) -> bool:
    strides = tf.get_static_value(operation.inputs[3])
    return (strides is None or bool((strides != 1).any())) and not keras_internals.is_laid_out(operation)


def _has_negative_axis(operation: tf.Operation) -> bool:
    *parts, axis = operation.inputs
    dim = tf.get_static_value(axis)  # positive in operations with a layout
    return dim is not None and bool(dim < 0) and not keras_internals.may_be_shapes(parts)


def _has_scalar_condition(operation: tf.Operation) -> bool:
    condition_rank, *other_ranks = (x.shape.rank for x in operation.inputs)
    return condition_rank == 0 and all(other_ranks)


_TRACING_RULE = (
    "must be traced within the step, which lays it out, because DTensor gives wrong results otherwise. Received: {name}. Avoid "
    "tf.raw_ops, and tf.function around code that is also called outside of the model."
)
_RULES = (
    _Rule(
        ("While", "StatelessWhile"),
        lambda _: True,
        "A model on a mesh must not contain loops: DTensor confuses their bodies. Received: {name}. Build recurrent layers "
        "with unroll=True, and use operations on whole batches instead of vectorized_map.",
    ),
    _Rule(
        ("StridedSlice",),
        _has_unnamed_dims,
        "On a mesh, x[None] must name every dim, as in x[None, :, :]; DTensor ends the process otherwise. Received: {name} of "
        "a tensor {shapes[0]}. Use tf.expand_dims or keras.ops.expand_dims.",
    ),
    _Rule(("StridedSlice",), _has_strides, f"On a mesh, a slice with strides {_TRACING_RULE}"),
    _Rule(("ConcatV2",), _has_negative_axis, f"On a mesh, a concatenation with a negative axis {_TRACING_RULE}"),
    _Rule(
        ("SelectV2",),
        _has_scalar_condition,
        "On a mesh, tf.where must not have a scalar condition; DTensor ends the process otherwise. Received: {name} of tensors "
        "{shapes[1]}. Broadcast the condition to their shape.",
    ),
)
