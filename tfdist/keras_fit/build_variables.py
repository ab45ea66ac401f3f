"""Creates the variables of a compiled model before they are placed."""

import contextlib
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.keras_fit.step_outputs import inspect_step


def create_variables(model: keras.Model, spec: Any, trains: bool) -> None:
    """Creates every variable, as Keras does; for a model with a custom step, in the order in which the step needs them.

    Args:
      model: compiled model.
      spec: structure of `tf.TensorSpec` of a batch.
      trains: whether the model is about to be trained.
    """
    own = keras_internals.overridden(model, "train_step")
    if own and type(model).call is keras.Model.call:
        model.built = True  # the step calls layers, and nothing calls the model
    if own and trains:
        # In the order, and with the shapes, of its step; those of its `call` may differ.
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # raised again when the step is created
            inspect_step(model, model.train_step, spec, lambda *given: None)
    try:
        with keras_internals.without_optimizer(model) if own else contextlib.nullcontext():
            keras_internals.build(model, spec)
    except (ValueError, NotImplementedError):
        # A custom step may create its labels, and its variables when it is traced.
        if not own:
            raise
