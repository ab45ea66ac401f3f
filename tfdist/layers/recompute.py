"""Activation checkpointing: selects the layers of a model that are recomputed in the backward pass."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import strategy_in_use
from tfdist.errors import InputError

# Rematerialization: a layer's activations are dropped after the forward pass and recomputed for the backward pass.
# Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174). A layer's sharded variables are gathered
# for each of the two passes, like the units of FSDP.


def rematerialize(layer: keras.Layer) -> None:
    """Lets a layer store only its inputs, and the stored parts of its variables, for the backward pass."""
    keras_internals.wrap_call(layer, _rematerialized)


class _First(NamedTuple):
    """Results of the forward pass besides tensors."""

    outputs: Any
    masks: Sequence[Any]
    has_logits: Sequence[bool]
    assigned: list[tuple[keras.Variable, Any]]
    adders: list[keras.Layer]


def _rematerialized(layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = keras.tree.flatten((args, kwargs))
        if any(isinstance(value, keras.KerasTensor) for value in arguments):
            return call(*args, **kwargs)
        indices = [i for i, value in enumerate(arguments) if tf.is_tensor(value) and value.dtype.is_floating]
        weights = list(layer.trainable_variables)
        state = (*layer.non_trainable_variables, *layer.metrics_variables)
        before = [(variable, keras_internals.uncast_value(variable)) for variable in state]
        surroundings = keras_internals.capture_call_context(layer)
        first: list[_First] = []

        def forward(tensors: Sequence[tf.Tensor], stored: Sequence[tf.Tensor]) -> Any:
            filled = list(arguments)
            for index, tensor in zip(indices, tensors, strict=True):
                filled[index] = tensor
                keras_internals.set_mask_and_logits(tensor, keras_internals.mask_and_logits(arguments[index])[0], None)
            own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            values = [_computed(variable, x, tensors) for variable, x in zip(weights, stored, strict=True)]
            scope = keras_internals.RecordedScope(
                [*zip(weights, values, strict=True), *before],
                sources=zip(weights, stored, strict=True),
                read=lambda variable: _read(variable, tensors),
            )
            with surroundings(), scope:
                outputs = call(*own_args, **own_kwargs)
            leaves = [x for x in keras.tree.flatten(outputs) if tf.is_tensor(x)]
            masks, logits = zip(*map(keras_internals.mask_and_logits, leaves), strict=True) if leaves else ((), ())
            adders = keras_internals.adders_of(layer, scope.losses)
            first.append(_First(outputs, masks, [x is not None for x in logits], scope.assigned, adders))
            return leaves, [x for x in logits if x is not None], list(scope.losses)

        tensors, stored = [arguments[index] for index in indices], [keras_internals.source_value(v) for v in weights]
        leaves, logits, losses = _again(forward, tensors, stored)
        for variable, value in first[0].assigned:
            variable.assign(value)
        for adder, loss in zip(first[0].adders, losses, strict=True):
            adder.add_loss(loss)
        remaining_logits = iter(logits)
        for output, mask, has_logits in zip(leaves, first[0].masks, first[0].has_logits, strict=True):
            keras_internals.set_mask_and_logits(output, mask, next(remaining_logits) if has_logits else None)
        remaining_outputs = iter(leaves)
        return keras.tree.map_structure(lambda x: next(remaining_outputs) if tf.is_tensor(x) else x, first[0].outputs)

    return wrapped


def _computed(variable: keras.Variable, held: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    strategy = strategy_in_use()
    return strategy.layouts.computed_from(variable, held, inputs) if strategy else held


def _read(variable: keras.Variable, inputs: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the value of another layer's weight, e.g. a tied one; its gradient goes to the variable itself."""
    value = keras_internals.value_of(variable)
    return (
        _computed(variable, tf.convert_to_tensor(value), inputs) if variable.trainable and value is not None else None
    )


def _again(forward: Callable[..., Any], tensors: Sequence[tf.Tensor], held: Sequence[tf.Tensor]) -> Any:
    """Calls a function of two lists of tensors; the gradient calls it again.

    Like `tf.recompute_grad`, which however reads one element of a gradient in order to wait for it: on a mesh, that
    would gather all of it.
    """

    @tf.custom_gradient
    def run(*both: tf.Tensor) -> Any:
        with keras_internals.no_gradients_recorded():
            outputs = forward(both[: len(tensors)], both[len(tensors) :])

        def gradient(*upstream: tf.Tensor, variables: Sequence[tf.Variable] | None = None) -> Any:
            others = list(variables or [])
            with tf.GradientTape() as tape:
                inputs = waiting(both, next(x for x in upstream if x.dtype.is_floating))
                tape.watch([*inputs, *others])
                again = forward(inputs[: len(tensors)], inputs[len(tensors) :])
            gradients = tape.gradient(keras.tree.flatten(again), [*inputs, *others], list(upstream))
            own = gradients[: len(inputs)]
            return (own, gradients[len(inputs) :]) if variables is not None else own

        return outputs, gradient

    return run(*tensors, *held)


def waiting(tensors: Sequence[tf.Tensor], other: tf.Tensor) -> list[tf.Tensor]:
    """Returns the same tensors, available only after another one is. Cost: one pass over each of them."""
    largest = tf.reduce_max(other)
    nothing = tf.math.is_nan(largest) & tf.math.is_inf(largest)  # always False, but no compiler can tell
    return [x + tf.cast(nothing, x.dtype) for x in tensors]


FULL, NONE = "full", "none"
_log = logging.getLogger(__name__)


def recompute(model: keras.Model, which: str = FULL) -> keras.Model:
    """Makes layers of a model store only their inputs for the backward pass; under any strategy (arXiv:1604.06174).

    Results are unchanged: a layer that draws random numbers or updates state is recomputed from its original state, and
    updates it only once. There is no gradient for what reaches a layer other than as an argument. Cost: one more
    forward pass of these layers; their intermediate activations are not stored between the passes.

    Args:
      model: model before its first step.
      which: "full" for every layer with weights; "none"; or a regular expression that must match a layer's whole path,
        such as "block_.*_attention".

    Returns:
      The model.

    Raises:
      InputError: it is not a regular expression, or matches no layer.
    """
    if which == NONE:
        return model
    layers = keras_internals.layers_of(model)
    chosen = [x for x in layers if x.variables or not x.built] if which == FULL else _matched(layers, which)
    inside = {id(inner) for layer in chosen for inner in keras_internals.layers_of(layer)}
    outermost = [layer for layer in chosen if id(layer) not in inside]
    for layer in outermost:
        rematerialize(layer)
    _log.debug("Recomputed in the backward pass: %s", ", ".join(keras_internals.path_of(layer) for layer in outermost))
    return model


def _matched(layers: list[keras.Layer], which: str) -> list[keras.Layer]:
    try:
        pattern = re.compile(which)
    except re.error as error:
        raise InputError(
            f"--recompute must be none, full or a regular expression. Received: {which!r}: {error}."
        ) from error
    matching = [layer for layer in layers if pattern.fullmatch(keras_internals.path_of(layer))]
    if not matching:
        paths = ", ".join(keras_internals.path_of(layer) for layer in layers[:4])
        raise InputError(
            f"--recompute must match the whole path of a layer. Received: {which!r}, with layers such as {paths}."
        )
    return matching
