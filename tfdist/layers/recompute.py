"""Activation checkpointing: recomputes selected layers of a model in the backward pass."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import strategy_in_use
from tfdist.errors import InputError

# Rematerialization: a layer's activations are discarded after the forward pass and recomputed for the backward pass.
# Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174). A layer's sharded variables are gathered
# in each of the two passes, like the units of FSDP.


def rematerialize(layer: keras.Layer) -> None:
    """Makes a layer keep only its inputs and the local shards of its variables for the backward pass."""
    keras_internals.wrap_call(layer, _rematerialize)


def _rematerialize(layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        arguments = keras.tree.flatten((args, kwargs))
        if any(isinstance(value, keras.KerasTensor) for value in arguments):
            return call(*args, **kwargs)
        indices = [i for i, value in enumerate(arguments) if tf.is_tensor(value) and value.dtype.is_floating]
        weights = list(layer.trainable_variables)
        state = (*layer.non_trainable_variables, *layer.metrics_variables)
        initial_state = [(variable, keras_internals.uncast_value(variable)) for variable in state]
        call_context = keras_internals.capture_call_context(layer)
        traces: list[tuple[Any, ...]] = []  # results of each forward pass that are not tensors

        def forward(tensors: Sequence[tf.Tensor], shards: Sequence[tf.Tensor]) -> Any:
            call_arguments = list(arguments)
            for index, tensor in zip(indices, tensors, strict=True):
                call_arguments[index] = tensor
                keras_internals.set_mask_and_logits(tensor, keras_internals.mask_and_logits(arguments[index])[0], None)
            call_args, call_kwargs = keras.tree.pack_sequence_as((args, kwargs), call_arguments)
            values = [_computed_value(variable, x, tensors) for variable, x in zip(weights, shards, strict=True)]
            scope = keras_internals.RecordedScope(
                [*zip(weights, values, strict=True), *initial_state],
                sources=zip(weights, shards, strict=True),
                read=lambda variable: _other_layer_value(variable, tensors),
            )
            with call_context(), scope:
                outputs = call(*call_args, **call_kwargs)
            leaves = [x for x in keras.tree.flatten(outputs) if tf.is_tensor(x)]
            masks, logits = zip(*map(keras_internals.mask_and_logits, leaves), strict=True) if leaves else ((), ())
            adders = keras_internals.layers_adding_losses(layer, scope.losses)
            traces.append((outputs, masks, [x is not None for x in logits], scope.assignments, adders))
            return leaves, [x for x in logits if x is not None], list(scope.losses)

        tensors, shards = [arguments[index] for index in indices], [keras_internals.source_value(v) for v in weights]
        leaves, logits, losses = _recompute_in_backward(forward, tensors, shards)
        outputs, masks, are_logits, assignments, adders = traces[0]
        for variable, value in assignments:
            variable.assign(value)
        for adder, loss in zip(adders, losses, strict=True):
            adder.add_loss(loss)
        remaining_logits = iter(logits)
        for output, mask, has_logits in zip(leaves, masks, are_logits, strict=True):
            keras_internals.set_mask_and_logits(output, mask, next(remaining_logits) if has_logits else None)
        remaining_outputs = iter(leaves)
        return keras.tree.map_structure(lambda x: next(remaining_outputs) if tf.is_tensor(x) else x, outputs)

    return wrapper


def _computed_value(variable: keras.Variable, shard: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    strategy = strategy_in_use()
    return strategy.layouts.compute_value(variable, shard, inputs) if strategy else shard


def _other_layer_value(variable: keras.Variable, inputs: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Returns the value of another layer's weight, such as a tied weight; the gradient is that of the variable itself."""
    value = keras_internals.value_of(variable)
    if not variable.trainable or value is None:
        return None
    return _computed_value(variable, tf.convert_to_tensor(value), inputs)


def _recompute_in_backward(
    forward: Callable[..., Any], tensors: Sequence[tf.Tensor], shards: Sequence[tf.Tensor]
) -> Any:
    """Calls a function of two lists of tensors; the gradient function calls it again.

    `tf.recompute_grad` is not used because it waits for a gradient by reading one element, which gathers the whole gradient
    on a mesh.
    """

    @tf.custom_gradient
    def run(*inputs_and_weights: tf.Tensor) -> Any:
        with keras_internals.without_gradient_recording():
            outputs = forward(inputs_and_weights[: len(tensors)], inputs_and_weights[len(tensors) :])

        def gradient(*upstream: tf.Tensor, variables: Sequence[tf.Variable] | None = None) -> Any:
            other_variables = list(variables or [])
            with tf.GradientTape() as tape:
                inputs = wait_for(inputs_and_weights, next(x for x in upstream if x.dtype.is_floating))
                tape.watch([*inputs, *other_variables])
                forward_outputs = forward(inputs[: len(tensors)], inputs[len(tensors) :])
            gradients = tape.gradient(keras.tree.flatten(forward_outputs), [*inputs, *other_variables], list(upstream))
            input_gradients = gradients[: len(inputs)]
            return (input_gradients, gradients[len(inputs) :]) if variables is not None else input_gradients

        return outputs, gradient

    return run(*tensors, *shards)


def wait_for(tensors: Sequence[tf.Tensor], dependency: tf.Tensor) -> list[tf.Tensor]:
    """Returns the same tensors, available only after `dependency`. Cost: one pass over each tensor."""
    largest = tf.reduce_max(dependency)
    always_false = tf.math.is_nan(largest) & tf.math.is_inf(largest)  # always False, but a compiler cannot know this
    return [x + tf.cast(always_false, x.dtype) for x in tensors]


FULL, NONE = "full", "none"
_log = logging.getLogger(__name__)


def recompute(model: keras.Model, which: str = FULL) -> keras.Model:
    """Makes layers of a model store only their inputs for the backward pass, under any strategy (arXiv:1604.06174).

    Results are unchanged: a layer that draws random numbers or updates state is recomputed from its original state, and
    updates its state only once. Gradients are computed with respect to a layer's arguments and weights, not tensors that
    its code captures. Cost: one more forward pass of these layers; their activations are not stored between the passes.

    Args:
      model: model before its first step.
      which: "full" for every layer with weights; "none" for no layer; or a regular expression that must match a layer's
        whole path, such as "block_.*_attention".

    Returns:
      The model.

    Raises:
      InputError: `which` is not a regular expression, or matches no layer.
    """
    if which == NONE:
        return model
    layers = keras_internals.layers_of(model)
    with_weights = [x for x in layers if x.variables or not x.built]
    selected_layers = with_weights if which == FULL else _match_layers(layers, which)
    nested_ids = {id(inner) for layer in selected_layers for inner in keras_internals.layers_of(layer)}
    outer_layers = [layer for layer in selected_layers if id(layer) not in nested_ids]
    for layer in outer_layers:
        rematerialize(layer)
    _log.debug("Recomputed in the backward pass: %s", ", ".join(map(keras_internals.path_of, outer_layers)))
    return model


def _match_layers(layers: list[keras.Layer], expression: str) -> list[keras.Layer]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise InputError(
            f"--recompute must be none, full or a regular expression. Received: {expression!r}: {error}."
        ) from error
    matches = [layer for layer in layers if pattern.fullmatch(keras_internals.path_of(layer))]
    if not matches:
        paths = ", ".join(keras_internals.path_of(layer) for layer in layers[:4])
        raise InputError(
            f"--recompute must match the whole path of a layer. Received: {expression!r}, with layers such as {paths}."
        )
    return matches
