"""Activation checkpointing: selects the layers of a model that are recomputed in the backward pass."""

import logging
import re

import keras

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.layers.rematerialization import rematerialize

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
    found = [layer for layer in layers if pattern.fullmatch(keras_internals.path_of(layer))]
    if not found:
        paths = ", ".join(keras_internals.path_of(layer) for layer in layers[:4])
        raise InputError(
            f"--recompute must match the whole path of a layer. Received: {which!r}, with layers such as {paths}."
        )
    return found
