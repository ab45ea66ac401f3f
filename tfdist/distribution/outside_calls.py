"""Refusal of calls of models on a mesh outside of its programs, which would mix tensors of the mesh and of one device."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.distribution.strategy import in_replica_function
from tfdist.errors import InputError


@functools.cache
def refuse_calls_outside() -> None:
    """Makes calls of layers with weights on a mesh raise `InputError` outside of replica functions, from now on.

    Building a model, which computes nothing, is not affected, and neither are the user's own programs of DTensors.
    """
    keras_internals.check_layer_calls(_check)


def _check(layer: keras.Layer, inputs: Sequence[Any]) -> None:
    if in_replica_function() or any(_may_be_of_a_mesh(x) for x in inputs):
        return
    # A compiled model may not have been built in the scope, where its optimizer was created.
    optimizer = layer.optimizer if isinstance(layer, keras.Model) and layer.compiled else None
    variables = [*layer.weights, *(optimizer.variables if optimizer is not None else [])]
    if any(isinstance(keras_internals.value_of(variable), dtensor.DVariable) for variable in variables):
        raise InputError(
            f"A model on a mesh computes only in programs that are compiled for the mesh. Received: a call of {layer.name} "
            "outside of them. Call tfdist.distribute(model) before its fit, evaluate, predict and ..._on_batch (instead of "
            "model(x), use predict_on_batch), or use tfdist.Trainer."
        )


def _may_be_of_a_mesh(x: Any) -> bool:
    """Returns True for a DTensor, and for an argument of a user's function that is being traced, which may be one."""
    if not isinstance(x, tf.Tensor):
        return False
    if hasattr(x, "numpy"):
        with tf.init_scope():
            return dtensor.is_dtensor(x)
    return x.op.type == "Placeholder" and not keras_internals.in_keras_function()
