"""The arguments of `Trainer.fit` and `Trainer.evaluate` that Keras's methods have, validated."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data import DataSet, Examples, as_examples, fit_data, with_class_weight
from tfdist.data.adapters import about_evaluation, all_data, check_array, of_test
from tfdist.data.examples import PartialEpochs
from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer, is_number

BATCH_SIZE = 32  # as in Keras


class Epochs(NamedTuple):
    """How the epochs of a call of `fit` are numbered and validated.

    Attributes:
      initial: number of the first epoch.
      validation_freq: validate every N epochs, or after the epochs with these numbers, counted from 1.
      validation_batch_size: global batch size of evaluations.
    """

    initial: int
    validation_freq: int | Collection[int]
    validation_batch_size: int

    def validates(self, epoch: int) -> bool:
        """Returns whether to validate after an epoch, counted from 0."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


class FitArguments(NamedTuple):
    """The data of a call of `fit` and how it is used.

    Attributes:
      data: examples for training and validation.
      batch_size: global batch size.
      steps: length of the run in steps, or 0.
      epochs: length of the run in epochs, or 0.
      numbered: numbers of the epochs, and which of them are validated.
    """

    data: DataSet
    batch_size: int
    steps: int
    epochs: int
    numbered: Epochs


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
    """Validates the arguments of `Trainer.fit`; `one_hot`: for `with_class_weight`.

    Raises:
      InputError: an argument is invalid.
    """
    _check_arrays(x, y)
    batch_size = checked_count("batch_size", batch_size)
    steps_per_epoch = checked_count("steps_per_epoch", steps_per_epoch)
    validation_steps = checked_count("validation_steps", validation_steps)
    validation_batch_size = checked_count("validation_batch_size", validation_batch_size)
    validation_freq = _checked_freq(validation_freq)
    steps, epochs = _length(steps, epochs, initial_epoch)
    with about_evaluation():
        if isinstance(validation_data, Iterator):
            validation_data = _read(validation_data, validation_steps)
        validation_data = of_test(validation_data)
    data = fit_data(x, y, sample_weight, validation_data, validation_split, steps_per_epoch, validation_steps)
    batch_size = batch_size or data.train.batch_size or BATCH_SIZE
    validation_batch_size = validation_batch_size or (data.test and data.test.batch_size) or batch_size
    train = data.train if shuffle else data.train.in_order()
    train = _counted(train, steps_per_epoch, batch_size)
    if class_weight:
        train = with_class_weight(train, class_weight, one_hot)
    test = data.test and _first(data.test, validation_steps, validation_batch_size)
    data = DataSet(data.name, train, test, data.input_shape, data.classes)
    return FitArguments(data, batch_size, steps, epochs, Epochs(initial_epoch, validation_freq, validation_batch_size))


def evaluation_arguments(
    x: Any, y: Any = None, batch_size: int | None = None, sample_weight: Any = None, steps: int | None = None
) -> tuple[Examples, int]:
    """Validates the arguments of `Trainer.evaluate`; returns the examples and the global batch size.

    Raises:
      InputError: an argument is invalid.
    """
    steps = checked_count("steps", steps)
    batch_size = checked_count("batch_size", batch_size)
    examples = as_examples(of_test(all_data(x, y, sample_weight)), steps)
    batch_size = batch_size or examples.batch_size or BATCH_SIZE
    return _first(examples, steps, batch_size), batch_size


def _read(batches: Iterator[Any], steps: int | None) -> Any:
    """Reads the first batches of a generator, which has to be evaluated several times."""
    if steps is None:
        raise InputError("A generator needs `validation_steps`. Received: a generator without it.")
    found = list(itertools.islice(batches, steps))
    if not found:
        raise InputError("A data set must have examples. Received: a generator without a batch.")
    return tf.nest.map_structure(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *found)


def _counted(examples: Examples, steps: int | None, batch_size: int) -> Examples:
    """Returns examples of which `steps` batches count as an epoch; all of them if `steps` is None."""
    return examples if steps is None else PartialEpochs(examples, steps * batch_size)


def _first(examples: Examples, steps: int | None, batch_size: int) -> Examples:
    """Returns the first `steps` batches of examples, at most all; all of them if `steps` is None."""
    size = min(examples.size, examples.rows or examples.size)
    wanted = size if steps is None else min(size, steps * batch_size)
    return examples if wanted == examples.size else PartialEpochs(examples, wanted)


def _length(steps: int | None, epochs: int | None, initial_epoch: int) -> tuple[int, int]:
    """Returns the length of a run in steps and in epochs, one of which is 0; by default one epoch."""
    if steps is None and epochs is None:
        epochs = initial_epoch + 1
    found = steps or 0, epochs or 0
    if not all(map(_is_whole, found)) or bool(steps) == bool(epochs) or min(found) < 0:
        raise InputError(
            f"Give either `steps` or `epochs`, a positive integer. Received: steps={steps}, epochs={epochs}."
        )
    if not is_integer(initial_epoch) or initial_epoch < 0 or 0 < found[1] <= initial_epoch:
        raise InputError(
            "`initial_epoch` must be an integer of at least 0 and less than `epochs`, the number of the last epoch. "
            f"Received: initial_epoch={initial_epoch}, epochs={epochs}."
        )
    return int(found[0]), int(found[1] and found[1] - initial_epoch)


def _check_arrays(x: Any, y: Any) -> None:
    if y is not None and (isinstance(x, tf.data.Dataset | keras.utils.PyDataset | Iterator)):
        raise InputError(
            f"`y` must be left out if `x` has the targets, too. Received: `y` with a {type(x).__name__}. Leave it out."
        )
    for name, value in (("x", x), ("y", y)):
        check_array(name, value)


def checked_count(name: str, value: Any) -> int | None:
    """Returns a positive number without a fraction, such as 3, 3.0 or `numpy.int64(3)`, as an integer; None for None.

    Raises:
      InputError: it is something else.
    """
    if value is None:
        return None
    if not _is_whole(value) or value < 1:
        raise InputError(f"`{name}` must be a positive integer. Received: {value!r}.")
    return int(value)


def _is_whole(value: Any) -> bool:
    return is_number(value) and value % 1 == 0


def _checked_freq(value: int | Collection[int]) -> int | Collection[int]:
    if is_integer(value) and int(value) >= 1:
        return int(value)
    if not isinstance(value, Collection) or isinstance(value, str):
        raise InputError(
            f"`validation_freq` must be a positive integer, or a list of epochs counted from 1. Received: {value!r}."
        )
    return value
