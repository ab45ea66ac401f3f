"""Requirements on a model that is cut into stages."""

from typing import Any

import keras

from tfdist import keras_internals
from tfdist.errors import InputError

_REPLACED = ("train_step", "compute_loss", "test_step", "predict_step")


def check_model(model: Any) -> None:
    """Checks that a model has a graph that can be cut, and no step of its own.

    Raises:
      InputError: it does not.
    """
    if not isinstance(model, keras.Model):
        raise InputError(
            f"Stages are cut from a keras.Model. Received: {type(model).__name__}. Build one with keras.Model."
        )
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call and not model.built:
        raise InputError(
            f"A sequential model must know its input to be cut into stages. Received: {model.name}, which is not built. "
            "Give it a keras.Input as its first layer."
        )
    if keras_internals.functional_of(model) is None:
        raise InputError(
            "Stages are cut from functional and sequential models, whose layers are known. Received: "
            f"{type(model).__name__}, with a `call` of its own. Build it as keras.Model(inputs, outputs)."
        )
    for name in _REPLACED:
        if getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model):
            raise InputError(
                f"A model that is cut into stages must use Keras's own `{name}`: no process has all of it. Received: "
                f"{type(model).__name__}, with a `{name}` of its own. Use a loss of `compile`, or another strategy."
            )
