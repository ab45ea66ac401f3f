"""Models by name: those of tfdist, or a user-defined `package.module:function`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from tfdist.config.spec import call, call_own, load_object, parse
from tfdist.errors import InputError
from tfdist.errors.suggestions import nearest
from tfdist.models.cnn import ZERO_GRADIENT as CNN_ZERO_GRADIENT
from tfdist.models.cnn import cnn
from tfdist.models.mlp import ZERO_GRADIENT as MLP_ZERO_GRADIENT
from tfdist.models.mlp import mlp
from tfdist.models.resnet50 import ZERO_GRADIENT as RESNET50_ZERO_GRADIENT
from tfdist.models.resnet50 import resnet50
from tfdist.models.transformer import ZERO_GRADIENT as TRANSFORMER_ZERO_GRADIENT
from tfdist.models.transformer import transformer


class _Entry(NamedTuple):
    function: Callable[..., keras.Model]
    zero_gradient: tuple[str, ...]


_MODELS = {
    "mlp": _Entry(mlp, MLP_ZERO_GRADIENT),
    "cnn": _Entry(cnn, CNN_ZERO_GRADIENT),
    "resnet50": _Entry(resnet50, RESNET50_ZERO_GRADIENT),
    "transformer": _Entry(transformer, TRANSFORMER_ZERO_GRADIENT),
}
NAMES = tuple(_MODELS)


def build(spec: str, input_shape: Sequence[int], classes: int) -> keras.Model:
    """Builds the model that a spec describes: `cnn`, `transformer(layers=4)`, `package.module:function(width=64)`.

    Args:
      spec: a name, and arguments of the model's function.
      input_shape: shape of one example, without the batch dim.
      classes: number of classes, or of tokens in the vocabulary, in the data.

    Returns:
      A Keras model. A user's function gets input_shape and classes if it has these parameters; arguments in the spec
      take precedence.

    Raises:
      InputError: the name or an argument is unknown, a user's module cannot be imported, the function raises (its own
        error is shown), or it does not return a Keras model.
    """
    parsed = parse(spec)
    made_for = {"input_shape": tuple(input_shape), "classes": classes}
    model = (
        call_own("--model", _function(parsed.name), parsed, **made_for)
        if ":" in parsed.name
        else call(_function(parsed.name), parsed, **made_for)
    )
    if not isinstance(model, keras.Model):
        raise InputError(
            f"--model={spec} must return a keras.Model. Received: {type(model).__name__}. Return the model."
        )
    return model


def zero_gradient_patterns(model_name: str) -> tuple[str, ...]:
    """Returns regular expressions (for `re.search`) for the paths of variables whose true gradient is zero.

    An optimizer turns their rounding noise into updates that differ between runs, without effect on the model's output.

    Args:
      model_name: a name, or a spec with arguments; for models not of tfdist, the result is empty.
    """
    entry = _MODELS.get(parse(model_name).name)
    return entry.zero_gradient if entry else ()


def _function(name: str) -> Callable[..., keras.Model]:
    if ":" in name:
        function = load_object(name)
        if not callable(function):
            raise InputError(f"--model={name} must name a function. Received: {type(function).__name__}.")
        return function
    if name not in _MODELS:
        raise InputError(f"--model={name} is not known.{nearest(name, NAMES)} Your own is package.module:function.")
    return _MODELS[name].function
