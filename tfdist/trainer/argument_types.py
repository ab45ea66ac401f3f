"""Checks arguments of `Trainer` whose errors would otherwise come later, or from code of Keras or TensorFlow."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.manager import Checkpoints
from tfdist.data import DataSet
from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer
from tfdist.gradients import Clip, LossScale, Reducer
from tfdist.gradients.bucket import BUCKET_ORDERS
from tfdist.gradients.compression import check as check_compression
from tfdist.grammar.spec import nearest
from tfdist.grammar.sync import Sync
from tfdist.trainer.options import Checks, Reporting, Schedule

_OF_KERAS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")  # which Keras's fit calls
_BY_LABELS = ("accuracy", "acc", "crossentropy", "ce")  # what Keras resolves by the shape of the labels


def check_trainer(model: Any, optimizer: Any, loss: Any, metrics: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Checks the arguments of `Trainer`.

    Args:
      model: `model`.
      optimizer: `optimizer`.
      loss: `loss`.
      metrics: `metrics` and `weighted_metrics`.
      options: the other ones, by name.

    Raises:
      InputError: one of them has the wrong type, or a name is not known.
    """
    _check_type("model", model, keras.Model, "a keras.Model", "keras.Sequential([...])")
    _check_steps(model)
    _check_optimizer(optimizer)
    for each in tf.nest.flatten(loss):
        if isinstance(each, str):
            _check_known("loss", each, keras.losses.get, _BY_LABELS)
    for given in metrics:
        _check_type("metrics", given, list | tuple | dict | None, "a list or a dict", '["accuracy"]')
        for each in tf.nest.flatten(given):
            if isinstance(each, str):
                _check_known("metrics", each, keras.metrics.get, _BY_LABELS)
    for name, least in {"seed": 0, "accumulate_steps": 1, "max_skipped_steps": 1}.items():
        _check_integer(name, options[name], least)
    _check_type("ema", options["ema"], numbers.Real, "a number", "0.999")
    _check_type("clip", options["clip"], Clip | None, "a tfdist.gradients.Clip", "tfdist.gradients.Clip(norm=1.0)")
    scale = options["loss_scale"]
    rule = "a tfdist.gradients.LossScale"
    _check_type("loss_scale", scale, LossScale | None, rule, "tfdist.gradients.LossScale(initial=1024)")
    _check_type("sync", options["sync"], str | Sync, "a text", '"local_sgd(period=8)"')
    _check_type("balance", options["balance"], str, "a text", '"measured" or "weights(2,1)"')
    compression = options["compression"]
    _check_type("compression", compression, str | Reducer, "a text or a tfdist.gradients.Reducer", '"topk(ratio=0.01)"')
    if isinstance(compression, str):
        check_compression(compression)
    if options["bucket_order"] not in BUCKET_ORDERS:
        raise InputError(
            f"`bucket_order` must be one of {', '.join(BUCKET_ORDERS)}. Received: {options['bucket_order']!r}. Leave it out "
            f'for "{BUCKET_ORDERS[0]}".'
        )


def _check_steps(model: keras.Model) -> None:
    own = [name for name in _OF_KERAS if keras_internals.overridden(model, name)]
    if own:
        raise InputError(
            f"A Trainer computes its model's steps itself. Received: a {type(model).__name__} with its own {', '.join(own)}. "
            "Use Keras's own fit: tfdist.distribute(model, strategy)."
        )


def check_fit(
    callbacks: Any, class_weight: Any, schedule: Any, checks: Any, reporting: Any, checkpoints: Any
) -> list[keras.callbacks.Callback]:
    """Checks arguments of `Trainer.fit`; returns the callbacks as a list.

    Raises:
      InputError: one of them has the wrong type.
    """
    _check_type("class_weight", class_weight, Mapping | None, "a dict of a weight by class", "{0: 1.0, 1: 2.0}")
    for label, weight in (class_weight or {}).items():
        if not is_integer(label) or isinstance(weight, str):
            raise InputError(
                f"`class_weight` must map class numbers to weights. Received: {label!r}: {weight!r}. Number the "
                "classes from 0."
            )
    _check_type("schedule", schedule, Schedule | None, "a tfdist.Schedule", "tfdist.Schedule(log_every=10)")
    _check_type("checks", checks, Checks | None, "a tfdist.Checks", "tfdist.Checks(check_sync_every=100)")
    _check_type("reporting", reporting, Reporting | None, "a tfdist.Reporting", "tfdist.Reporting(reporter=...)")
    example = 'tfdist.Checkpoints(directory="runs/one")'
    _check_type("checkpoints", checkpoints, Checkpoints | None, "a tfdist.Checkpoints", example)
    return checked_callbacks(callbacks)


def checked_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list.

    Raises:
      InputError: one of them is something else.
    """
    found = [] if callbacks is None else tf.nest.flatten(callbacks)
    for each in found:
        if isinstance(each, type) and issubclass(each, keras.callbacks.Callback):
            raise InputError(
                f"Callbacks must be objects. Received: the class {each.__name__}. Write {each.__name__}(...)."
            )
        example = "[keras.callbacks.TerminateOnNaN()]"
        _check_type("callbacks", each, keras.callbacks.Callback, "Keras callbacks", example)
    return found


def check_targets(has_loss: bool, spec: Any, what: str) -> None:
    """Raises `InputError` if there are no targets for a loss; `spec`: see `Examples.element_spec`, `what`: names the data."""
    if has_loss and not tf.nest.flatten(spec[1]):
        raise InputError(
            f"The loss needs targets, but the {what} has none. Received: inputs alone. Give (x, y), or a dataset of such pairs."
        )


def check_targets_of(has_loss: bool, data: DataSet) -> None:
    """Same as `check_targets`, for the training and the validation data of a run."""
    check_targets(has_loss, data.train.element_spec, "data")
    if data.test is not None:
        check_targets(has_loss, data.test.element_spec, "validation data")


def _check_type(name: str, value: Any, kind: Any, rule: str, example: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        received = "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
        raise InputError(f"`{name}` must be {rule}. Received: {received}. Write {name}={example}.")


def _check_integer(name: str, value: Any, least: int) -> None:
    if not is_integer(value) or value < least:
        raise InputError(f"`{name}` must be an integer of at least {least}. Received: {value!r}.")


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise InputError(f"`optimizer` must be an object or a name. Received: the class {name}. Write {name}(...).")
    if isinstance(optimizer, str):
        kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
        names = [kind.__name__.lower() for kind in kinds if issubclass(kind, keras.Optimizer)]
        _check_known("optimizer", optimizer, keras.optimizers.get, [name for name in names if "optimizer" not in name])
    elif not isinstance(optimizer, keras.Optimizer | dict):
        _check_type("optimizer", optimizer, keras.Optimizer, "a keras.Optimizer or a name", '"adam"')


def _check_known(argument: str, name: str, get: Callable[[str], Any], known: Sequence[str]) -> None:
    """Checks a name of Keras; `known`: further names, or those to list."""
    if name.lower() in known:
        return
    try:
        get(name)
    except ValueError as error:
        module = {"loss": keras.losses, "metrics": keras.metrics}.get(argument)
        public = [word for word in vars(module or object) if word.islower() and not word.startswith("_")]
        names = {*known, *(set(public) - {"get", "serialize", "deserialize"})}
        raise InputError(f'`{argument}="{name}"` is not known.{nearest(name, names)}') from error
