"""Models by name: those of tfdist, or a user-defined `package.module:function`."""

from collections.abc import Callable, Sequence

import keras

from tfdist.config.spec import call, call_own, load_object, parse
from tfdist.errors import InputError
from tfdist.errors.formatting import nearest
from tfdist.models.architectures import cnn, mlp, resnet50, transformer

_MODELS: dict[str, Callable[..., keras.Model]] = {f.__name__: f for f in (mlp, cnn, resnet50, transformer)}
NAMES = tuple(_MODELS)
_ZERO_GRADIENTS: dict[str, tuple[str, ...]] = {
    # Each convolution has a bias, which the following batch normalization subtracts again.
    "resnet50": (r"^conv\d+(_block\d+_\d+)?_conv/bias$",),
    # A bias of the keys adds the same number to all scores of a query, which does not change the softmax.
    "transformer": (r"_attention/key/bias$",),
}


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
    function, of_data = _function(parsed.name), {"input_shape": tuple(input_shape), "classes": classes}
    model = (
        call_own("--model", function, parsed, **of_data) if ":" in parsed.name else call(function, parsed, **of_data)
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
    return _ZERO_GRADIENTS.get(parse(model_name).name, ())


def _function(name: str) -> Callable[..., keras.Model]:
    if ":" in name:
        function = load_object(name)
        if not callable(function):
            raise InputError(f"--model={name} must name a function. Received: {type(function).__name__}.")
        return function
    if name not in _MODELS:
        raise InputError(f"--model={name} is not known.{nearest(name, NAMES)} Your own is package.module:function.")
    return _MODELS[name]
