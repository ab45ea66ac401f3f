"""Refusal of calls of models on a mesh outside of its programs, which would mix tensors of the mesh and of one device."""

import functools

import keras
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.distribution.strategy import in_replica_function
from tfdist.errors import InputError


@functools.cache
def refuse_calls_outside() -> None:
    """Makes calls of layers with weights on a mesh raise `InputError` outside of replica functions, from now on.

    Building a model, which computes nothing, is not affected.
    """
    keras_internals.check_layer_calls(_check)


def _check(layer: keras.Layer) -> None:
    if in_replica_function():
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
