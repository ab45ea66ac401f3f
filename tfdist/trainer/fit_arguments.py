"""Validates the arguments of `Trainer.fit` and `Trainer.evaluate`."""

import itertools
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.manager import Checkpoints
from tfdist.config.sync import Sync
from tfdist.data import DatasetSplits, Examples, as_examples, fit_data, with_class_weight
from tfdist.data.examples import PartialEpochs
from tfdist.data.inputs import all_data, check_array, evaluation_errors, test_examples
from tfdist.errors import InputError, is_integer, is_number, nearest
from tfdist.gradients import Clip, LossScale, Reducer
from tfdist.gradients.bucket import BUCKET_ORDERS
from tfdist.gradients.compression import check as check_compression
from tfdist.trainer.options import Checks, Reporting, Schedule

# Methods with which a model customizes Keras's fit.
_STEP_METHODS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
# Names that Keras resolves by the shape of the labels.
_LABEL_DEPENDENT_NAMES = ("accuracy", "acc", "crossentropy", "ce")


def check_trainer(model: Any, optimizer: Any, loss: Any, metrics: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises `InputError` for a wrong type or an unknown name in the arguments of `Trainer`, the last ones in `options`."""
    _check_type("model", model, keras.Model, "a keras.Model", "keras.Sequential([...])")
    if names := [name for name in _STEP_METHODS if keras_internals.is_overridden(model, name)]:
        raise InputError(
            f"A Trainer does not call methods that customize Keras's fit. Received: a {type(model).__name__} that overrides "
            f"{', '.join(names)}. Use Keras's own fit: tfdist.distribute(model, strategy)."
        )
    _check_optimizer(optimizer)
    for item in tf.nest.flatten(loss):
        if isinstance(item, str):
            _check_name("loss", item, keras.losses.get, _LABEL_DEPENDENT_NAMES)
    for names in metrics:
        _check_type("metrics", names, list | tuple | dict | None, "a list or a dict", '["accuracy"]')
        for item in tf.nest.flatten(names):
            if isinstance(item, str):
                _check_name("metrics", item, keras.metrics.get, _LABEL_DEPENDENT_NAMES)
    for name, minimum in {"seed": 0, "accumulate_steps": 1, "max_skipped_steps": 1}.items():
        if not is_integer(options[name]) or options[name] < minimum:
            raise InputError(f"`{name}` must be an integer of at least {minimum}. Received: {options[name]!r}.")
    for name, kind, rule, example in (
        ("ema", numbers.Real, "a number", "0.999"),
        ("clip", Clip | None, "a tfdist.gradients.Clip", "tfdist.gradients.Clip(norm=1.0)"),
        ("loss_scale", LossScale | None, "a tfdist.gradients.LossScale", "tfdist.gradients.LossScale(initial=1024)"),
        ("sync", str | Sync, "a string", '"local_sgd(period=8)"'),
        ("balance", str, "a string", '"measured" or "weights(2,1)"'),
        ("compression", str | Reducer, "a string or a tfdist.gradients.Reducer", '"topk(ratio=0.01)"'),
    ):
        _check_type(name, options[name], kind, rule, example)
    compression = options["compression"]
    if isinstance(compression, str):
        check_compression(compression)
    if options["bucket_order"] not in BUCKET_ORDERS:
        raise InputError(
            f"`bucket_order` must be one of {', '.join(BUCKET_ORDERS)}. Received: {options['bucket_order']!r}. The "
            f'default is "{BUCKET_ORDERS[0]}".'
        )


def check_fit(
    callbacks: Any, class_weight: Any, schedule: Any, checks: Any, reporting: Any, checkpoints: Any
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks as a list; raises `InputError` if an argument of `Trainer.fit` has the wrong type."""
    _check_type("class_weight", class_weight, Mapping | None, "a dict from classes to weights", "{0: 1.0, 1: 2.0}")
    for label, weight in (class_weight or {}).items():
        if not is_integer(label) or isinstance(weight, str):
            raise InputError(
                f"`class_weight` must map integer class indices to weights. Received: {label!r}: {weight!r}. Number the "
                "classes from 0."
            )
    _check_type("schedule", schedule, Schedule | None, "a tfdist.Schedule", "tfdist.Schedule(log_every=10)")
    _check_type("checks", checks, Checks | None, "a tfdist.Checks", "tfdist.Checks(check_sync_every=100)")
    _check_type("reporting", reporting, Reporting | None, "a tfdist.Reporting", "tfdist.Reporting(reporter=...)")
    example = 'tfdist.Checkpoints(directory="runs/one")'
    _check_type("checkpoints", checkpoints, Checkpoints | None, "a tfdist.Checkpoints", example)
    return validate_callbacks(callbacks)


def validate_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list; raises `InputError` if one is not a Keras callback."""
    callback_list = [] if callbacks is None else tf.nest.flatten(callbacks)
    for callback in callback_list:
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            raise InputError(
                f"Callbacks must be instances, not classes. Received: the class {callback.__name__}. Pass "
                f"{callback.__name__}(...)."
            )
        example = "[keras.callbacks.TerminateOnNaN()]"
        _check_type("callbacks", callback, keras.callbacks.Callback, "Keras callbacks", example)
    return callback_list


def check_targets(has_loss: bool, spec: Any, noun: str) -> None:
    """Raises `InputError` if there is a loss, but data with this `Examples.element_spec` has no targets."""
    if has_loss and not tf.nest.flatten(spec[1]):
        raise InputError(
            f"The loss needs targets, but the {noun} has none. Received: only inputs. Pass (x, y), or a dataset of such pairs."
        )


def _check_type(name: str, value: Any, kind: Any, rule: str, example: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        received = "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
        raise InputError(f"`{name}` must be {rule}. Received: {received}. For example, pass {name}={example}.")


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise InputError(f"`optimizer` must be an instance or a name. Received: the class {name}. Pass {name}(...).")
    if isinstance(optimizer, str):
        kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
        names = [kind.__name__.lower() for kind in kinds if issubclass(kind, keras.Optimizer)]
        _check_name("optimizer", optimizer, keras.optimizers.get, [name for name in names if "optimizer" not in name])
    elif not isinstance(optimizer, keras.Optimizer | dict):
        _check_type("optimizer", optimizer, keras.Optimizer, "a keras.Optimizer or a name", '"adam"')


def _check_name(argument: str, name: str, get: Callable[[str], Any], valid_names: Sequence[str]) -> None:
    """Checks that Keras knows a name; `valid_names` are further valid names, which are also suggested."""
    if name.lower() in valid_names:
        return
    try:
        get(name)
    except ValueError as error:
        module = {"loss": keras.losses, "metrics": keras.metrics}.get(argument)
        public_names = [word for word in vars(module or object) if word.islower() and not word.startswith("_")]
        names = {*valid_names, *(set(public_names) - {"get", "serialize", "deserialize"})}
        raise InputError(f'`{argument}="{name}"` is not known.{nearest(name, names)}') from error


DEFAULT_BATCH_SIZE = 32  # as in Keras


class FitArguments(NamedTuple):
    """The validated arguments of a call of `fit`."""

    data: DatasetSplits  # examples for training and validation
    batch_size: int  # global batch size
    steps: int  # length of the run in steps, or 0
    epochs: int  # length of the run in epochs, or 0
    initial_epoch: int  # index of the first epoch, for callbacks
    validation_freq: int | Collection[int]  # epochs between validations, or the epochs after which to validate, from 1
    validation_batch_size: int  # global batch size of evaluations

    def validates(self, epoch: int) -> bool:
        """Returns whether to validate after an epoch, counted from 0."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


def fit_arguments(
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    *,
    steps: int | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    one_hot: bool | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
) -> FitArguments:
    """Validates the arguments of `Trainer.fit`; raises `InputError`. See `with_class_weight` for `one_hot`."""
    if y is not None and isinstance(x, tf.data.Dataset | keras.utils.PyDataset | Iterator):
        raise InputError(
            f"`y` must not be passed if `x` already contains the targets. Received: `y` with a {type(x).__name__}. Remove `y`."
        )
    for name, value in (("x", x), ("y", y)):
        check_array(name, value)
    batch_size = validate_count("batch_size", batch_size)
    steps_per_epoch = validate_count("steps_per_epoch", steps_per_epoch)
    validation_steps = validate_count("validation_steps", validation_steps)
    validation_batch_size = validate_count("validation_batch_size", validation_batch_size)
    validation_freq = _validate_freq(validation_freq)
    steps, epochs = _parse_length(steps, epochs, initial_epoch)
    with evaluation_errors():
        if isinstance(validation_data, Iterator):
            validation_data = _read_batches(validation_data, validation_steps)
        validation_data = test_examples(validation_data)
    data = fit_data(x, y, sample_weight, validation_data, validation_split, steps_per_epoch, validation_steps)
    batch_size = batch_size or data.train.batch_size or DEFAULT_BATCH_SIZE
    validation_batch_size = validation_batch_size or (data.test and data.test.batch_size) or batch_size
    train = data.train if shuffle else data.train.in_order()
    if steps_per_epoch is not None:
        train = PartialEpochs(train, steps_per_epoch * batch_size)
    if class_weight:
        train = with_class_weight(train, class_weight, one_hot)
    test = data.test and _limit(data.test, validation_steps, validation_batch_size)
    data = DatasetSplits(data.name, train, test, data.input_shape, data.classes)
    return FitArguments(data, batch_size, steps, epochs, initial_epoch, validation_freq, validation_batch_size)


def evaluation_arguments(
    x: Any, y: Any = None, batch_size: int | None = None, sample_weight: Any = None, steps: int | None = None
) -> tuple[Examples, int]:
    """Validates the arguments of `Trainer.evaluate`, or raises `InputError`; returns examples and global batch size."""
    steps = validate_count("steps", steps)
    batch_size = validate_count("batch_size", batch_size)
    examples = as_examples(test_examples(all_data(x, y, sample_weight)), steps)
    batch_size = batch_size or examples.batch_size or DEFAULT_BATCH_SIZE
    return _limit(examples, steps, batch_size), batch_size


def _read_batches(batches: Iterator[Any], steps: int | None) -> Any:
    if steps is None:
        raise InputError("A generator requires `validation_steps`. Received: a generator without `validation_steps`.")
    batch_list = list(itertools.islice(batches, steps))
    if not batch_list:
        raise InputError("A dataset must have examples. Received: an empty generator.")
    return tf.nest.map_structure(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *batch_list)


def _limit(examples: Examples, steps: int | None, batch_size: int) -> Examples:
    """Returns the first `steps` batches of examples; all of them if `steps` is None."""
    size = min(examples.size, examples.rows or examples.size)
    count = size if steps is None else min(size, steps * batch_size)
    return examples if count == examples.size else PartialEpochs(examples, count)


def _parse_length(steps: int | None, epochs: int | None, initial_epoch: int) -> tuple[int, int]:
    """Returns the length of a run in steps and in epochs, one of which is 0; by default one epoch."""
    if steps is None and epochs is None:
        epochs = initial_epoch + 1
    lengths = steps or 0, epochs or 0
    if not all(map(_is_integral, lengths)) or bool(steps) == bool(epochs) or min(lengths) < 0:
        raise InputError(
            f"Exactly one of `steps` and `epochs` must be set, to a positive integer. Received: steps={steps}, epochs={epochs}."
        )
    if not is_integer(initial_epoch) or initial_epoch < 0 or 0 < lengths[1] <= initial_epoch:
        raise InputError(
            "`initial_epoch` must be an integer of at least 0 and less than `epochs`, which includes earlier epochs. "
            f"Received: initial_epoch={initial_epoch}, epochs={epochs}."
        )
    return int(lengths[0]), int(lengths[1] and lengths[1] - initial_epoch)


def validate_count(name: str, value: Any) -> int | None:
    """Returns a positive integral number, such as 3, 3.0 or `numpy.int64(3)`, as an int, and None for None.

    Raises `InputError` for any other value.
    """
    if value is None:
        return None
    if not _is_integral(value) or value < 1:
        raise InputError(f"`{name}` must be a positive integer. Received: {value!r}.")
    return int(value)


def _is_integral(value: Any) -> bool:
    return is_number(value) and value % 1 == 0


def _validate_freq(value: int | Collection[int]) -> int | Collection[int]:
    if is_integer(value) and int(value) >= 1:
        return int(value)
    if not isinstance(value, Collection) or isinstance(value, str):
        raise InputError(
            f"`validation_freq` must be a positive integer, or a list of epochs counted from 1. Received: {value!r}."
        )
    return value
