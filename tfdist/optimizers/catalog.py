"""Creates optimizers, losses and metrics from text in the syntax of flags, such as `sgd(momentum=0.9)`."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.config.spec import call_user_function, load_object, parse
from tfdist.errors import InputError, nearest
from tfdist.optimizers import LARS, MomentumCorrectedSGD

_LABEL_DEPENDENT = ("accuracy", "acc", "crossentropy", "ce")  # names that Keras resolves by the shape of the labels
_SHORT_NAMES = {
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "mse": "mean_squared_error",
    "msle": "mean_squared_logarithmic_error",
}


def create_optimizer(
    text: str, learning_rate: Any, momentum_correction: bool = False, flag: str = "--optimizer"
) -> keras.Optimizer:
    """Creates an optimizer.

    Args:
      text: `name(key=value, ...)` with the lower-case name of a Keras optimizer, `lars`, or a user-defined
        `package.module:name(...)`.
      learning_rate: a float or a schedule; used unless `text` contains a learning rate.
      momentum_correction: whether sgd and lars exclude the learning rate from the momentum.
      flag: name of the flag, for messages.

    Raises:
      InputError: the name or an argument is unknown, or the optimizer rejects an argument.
    """
    spec = parse(text)
    classes = _classes(keras.optimizers, keras.Optimizer, exclude=("Optimizer", "LossScaleOptimizer", "MultiOptimizer"))
    classes |= {"lars": LARS} | ({"sgd": MomentumCorrectedSGD} if momentum_correction else {})
    defaults = {"learning_rate": learning_rate, "momentum_correction": momentum_correction}
    optimizer = call_user_function(flag, _find(spec.name, classes, flag), spec, **defaults)
    if not isinstance(optimizer, keras.Optimizer):
        raise InputError(f"{flag}={text} must create a keras.Optimizer. Received: {type(optimizer).__name__}.")
    return optimizer


def create_loss(text: str) -> keras.Loss:
    """Creates a loss from `name(key=value, ...)`, with the snake_case or short name of a Keras loss, or a user-defined one.

    Raises:
      InputError: the name or an argument is unknown.
    """
    spec = parse(text)
    classes = _classes(keras.losses, keras.Loss, exclude=("Loss",))
    loss = call_user_function("--loss", _find(_SHORT_NAMES.get(spec.name, spec.name), classes, "--loss"), spec)
    if not isinstance(loss, keras.Loss):
        raise InputError(f"--loss={text} must create a keras.Loss. Received: {type(loss).__name__}.")
    return loss


def create_metrics(text: str) -> list[str]:
    """Splits comma-separated names of Keras metrics for `keras.Model.compile`, which resolves `accuracy`.

    Raises:
      InputError: a name is unknown, or its metric requires arguments.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        try:
            if name not in _LABEL_DEPENDENT:
                keras.metrics.get(name)
        except ValueError:
            known_names = *_LABEL_DEPENDENT, *_classes(keras.metrics, keras.Metric, exclude=("Metric",))
            raise InputError(f"--metrics={name} is not known.{nearest(name, known_names)}") from None
        except TypeError as error:
            raise InputError(
                f"--metrics takes metrics that need no arguments. Received: {name} ({error}). "
                "Pass such a metric to tfdist.Trainer, in a program."
            ) from error
    return names


def _find(name: str, classes: Mapping[str, Any], flag: str) -> Any:
    if ":" in name:
        return load_object(name)
    if name not in classes:
        raise InputError(f"{flag}={name} is not known.{nearest(name, classes)}")
    return classes[name]


def _classes(module: Any, base: type, exclude: tuple[str, ...]) -> dict[str, type]:
    members = inspect.getmembers(module, lambda x: inspect.isclass(x) and issubclass(x, base))
    spell = str.lower if base is keras.Optimizer else _snake_case
    return {spell(name): value for name, value in members if name not in exclude}


def _snake_case(name: str) -> str:
    """Converts KLDivergence to kl_divergence, as Keras does."""
    return re.sub("([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)).lower()


def average_weights(optimizer: keras.Optimizer, momentum: float) -> None:
    """Makes an optimizer average the weights, like Keras's `use_ema`, but never overwrite them with the average.

    After update t with weights w_t, the average is

        a_1 = w_1,        a_t = momentum a_(t-1) + (1 - momentum) w_t

    The average is part of the optimizer's state: it is stored, sharded and restored like momentum, and a skipped step does
    not change it. Memory: one variable per trainable variable.

    Args:
      optimizer: an optimizer that is not built yet.
      momentum: in [0, 1); 0 leaves the optimizer unchanged.

    Raises:
      InputError: the momentum is out of range, or the optimizer is already built.
    """
    if not 0 <= momentum < 1:
        raise InputError(f"ema must be at least 0 and less than 1, such as 0.999. Received: ema={momentum}.")
    if not momentum:
        return
    if optimizer.built:
        raise InputError(
            "An optimizer that averages the weights must not be built yet. Received: "
            f"ema={momentum} and a built {type(optimizer).__name__}. Create a new optimizer."
        )
    optimizer.use_ema, optimizer.ema_momentum, optimizer.ema_overwrite_frequency = True, momentum, None
