"""Recomputation: a layer's activations are dropped after the forward pass and computed again for the backward pass.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174).
"""

import logging
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.layers import MixtureOfExperts

FULL, NONE = "full", "none"
_log = logging.getLogger(__name__)


def recompute(model: keras.Model, which: str = FULL) -> keras.Model:
    """Lets layers of a model keep their inputs alone for the backward pass; under any strategy.

    Results are the same: a layer that draws random numbers or updates state is computed again from the state it had, and
    moves that once. One difference: a weight on which the loss does not depend has a gradient of zeros, so that an
    optimizer with decay moves it. Cost: those layers' forward pass once more; of a layer, what lies between its input and
    its output is not held between the passes.

    Args:
      model: before its first step.
      which: "full" for every layer that has weights, without mixtures of experts, which add losses; "none"; or a regular
        expression that the whole path of a layer matches, such as "block_.*_attention".

    Returns:
      The model.

    Raises:
      InputError: it is no regular expression, or matches no layer.
    """
    if which == NONE:
        return model
    layers = keras_internals.layers_of(model)
    chosen = [x for x in layers if _by_itself(x)] if which == FULL else _matched(layers, which)
    inside = {id(inner) for layer in chosen for inner in keras_internals.layers_of(layer)}
    outermost = [layer for layer in chosen if id(layer) not in inside]
    for layer in outermost:
        keras_internals.wrap_call(layer, _recomputed)
    _log.debug("Recomputed in the backward pass: %s", ", ".join(_path(layer) for layer in outermost))
    return model


def _by_itself(layer: keras.Layer) -> bool:
    """Whether "full" has a layer computed again: not one that adds losses, nor what such a layer is inside of."""
    inside = [layer, *keras_internals.layers_of(layer)]
    return bool(layer.variables or not layer.built) and not any(isinstance(x, MixtureOfExperts) for x in inside)


def _matched(layers: list[keras.Layer], which: str) -> list[keras.Layer]:
    try:
        pattern = re.compile(which)
    except re.error as error:
        raise InputError(
            f"--recompute must be none, full or a regular expression. Received: {which!r}: {error}."
        ) from error
    found = [layer for layer in layers if pattern.fullmatch(_path(layer))]
    if not found:
        paths = ", ".join(_path(layer) for layer in layers[:4])
        raise InputError(
            f"--recompute must match the whole path of a layer. Received: {which!r}, with layers such as {paths}."
        )
    return found


def _path(layer: keras.Layer) -> str:
    """A layer's path; one that has no weights may have a name alone."""
    return layer.path or layer.name


def _recomputed(layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = keras.tree.flatten((args, kwargs))
        if any(isinstance(value, keras.KerasTensor) for value in given):
            return call(*args, **kwargs)
        places = [i for i, value in enumerate(given) if tf.is_tensor(value) and value.dtype.is_floating]
        weights = list(layer.trainable_variables)
        before = [(variable, keras_internals.uncast_value(variable)) for variable in layer.non_trainable_variables]
        surroundings = keras_internals.same_call_again(layer)
        first: list[tuple[list[Any], list[tuple[keras.Variable, Any]]]] = []

        def forward(tensors: list[tf.Tensor], values: list[tf.Tensor]) -> Any:
            filled = list(given)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = keras_internals.with_mask_of(tensor, given[place], tf.identity)
            own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            with surroundings(), keras_internals.RecordedScope([*zip(weights, values, strict=True), *before]) as scope:
                outputs = call(*own_args, **own_kwargs)
            _refuse_losses(layer, scope)
            first.append(([keras_internals.mask_of(x) for x in keras.tree.flatten(outputs)], scope.assigned))
            return outputs

        tensors, values = [given[place] for place in places], [keras_internals.uncast_value(v) for v in weights]
        outputs = tf.recompute_grad(forward)(tensors, values)
        masks, assigned = first[0]
        for variable, value in assigned:
            variable.assign(value)
        for output, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
            if mask is not None:
                keras_internals.set_mask(output, mask)
        return outputs

    return wrapped


def _refuse_losses(layer: keras.Layer, scope: keras.StatelessScope) -> None:
    if scope.losses:
        raise InputError(
            f"A layer that is computed again must add no loss inside. Received: {_path(layer)}, which does by add_loss or by "
            "an activity regularizer of a layer in it. Leave it out of --recompute."
        )
