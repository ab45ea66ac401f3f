"""Creates the variables of a model that is compiled, before they are placed."""

import contextlib
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.keras_fit.logs import inspect_step
from tfdist.keras_fit.patches import overridden


def create_variables(model: keras.Model, spec: Any, trains: bool) -> None:
    """Creates every variable, as Keras does; of a model with a step of its own, as that asks for them.

    Args:
      model: compiled.
      spec: structure of `tf.TensorSpec` of a batch.
      trains: whether it is about to be trained.
    """
    own = overridden(model, "train_step")
    if own and type(model).call is keras.Model.call:
        model.built = True  # its step calls layers, and nothing calls the model
    if own and trains:
        # In the order, and for the shapes, that its step has; its `call` may have others.
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # which come again when the step is made
            inspect_step(model, model.train_step, spec, lambda *given: None)
    try:
        with keras_internals.without_optimizer(model) if own else contextlib.nullcontext():
            keras_internals.build(model, spec)
    except (ValueError, NotImplementedError):
        if not own:  # which may make its labels, and asks for what it needs when it is looked at
            raise
