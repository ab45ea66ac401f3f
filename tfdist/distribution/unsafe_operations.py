"""Operations with which DTensor crashes, fails intermittently or is silently wrong: refused before it compiles them."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError


class _Rule(NamedTuple):
    """Operations of these types to which `applies` applies are refused; the message may name them and their inputs' shapes."""

    types: tuple[str, ...]
    applies: Callable[[tf.Operation], bool]
    message: str


def refuse_unsafe_operations(graph: tf.Graph) -> None:
    """Raises `InputError` for an operation of a function, or of one that it calls, that DTensor must not compile."""
    for operation in keras_internals.operations_of(graph):
        for rule in _RULES:
            if operation.type in rule.types and rule.applies(operation):
                shapes = [x.shape for x in operation.inputs]
                raise InputError(rule.message.format(name=operation.name, shapes=shapes))


def _adds_a_dim_to_unnamed_dims(operation: tf.Operation) -> bool:
    new, ellipsis = operation.get_attr("new_axis_mask"), operation.get_attr("ellipsis_mask")
    rank, entries = operation.inputs[0].shape.rank, operation.inputs[1].shape[0]
    named = (entries or 0) - new.bit_count() - ellipsis.bit_count()
    behind_the_ellipsis = ellipsis and new & -new > ellipsis  # x[..., None] does not crash
    return bool(new) and (rank is None or named < rank) and not behind_the_ellipsis


def _has_strides_of_its_own(operation: tf.Operation) -> bool:
    strides = tf.get_static_value(operation.inputs[3])
    return (strides is None or bool((strides != 1).any())) and not keras_internals.is_laid_out(operation)


def _has_a_negative_axis(operation: tf.Operation) -> bool:
    *parts, axis = operation.inputs
    dim = tf.get_static_value(axis)  # it is positive in what was laid out
    return dim is not None and bool(dim < 0) and not keras_internals.may_be_shapes(parts)


def _has_a_scalar_condition(operation: tf.Operation) -> bool:
    condition, *others = (x.shape.rank for x in operation.inputs)
    return condition == 0 and all(others)


_TRACED = (
    "must be traced within the step, which lays it out; otherwise, DTensor gives wrong results. Received: {name}. Avoid "
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
        _adds_a_dim_to_unnamed_dims,
        "On a mesh x[None] must name every dim, as in x[None, :, :]; DTensor ends the process otherwise. Received: {name} of a "
        "tensor {shapes[0]}. Use tf.expand_dims or keras.ops.expand_dims.",
    ),
    _Rule(("StridedSlice",), _has_strides_of_its_own, f"On a mesh, a slice with strides {_TRACED}"),
    _Rule(("ConcatV2",), _has_a_negative_axis, f"On a mesh, a concatenation with a negative axis {_TRACED}"),
    _Rule(
        ("SelectV2",),
        _has_a_scalar_condition,
        "On a mesh tf.where must not have a scalar condition; DTensor ends the process otherwise. Received: {name} of tensors "
        "{shapes[1]}. Broadcast the condition to their shape.",
    ),
)
