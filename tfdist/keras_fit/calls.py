"""A call of one of Keras's methods: every process makes the same ones, in the same order, with callbacks that agree."""

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.coordination import Group
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, PeerLostError
from tfdist.step.callbacks import chosen

_BATCH_EVENTS = ("on_batch_begin", "on_batch_end")
_TRAIN_EVENTS = (*_BATCH_EVENTS, "on_train_batch_begin", "on_train_batch_end")
_TEST_EVENTS = ("on_test_batch_begin", "on_test_batch_end")
ENDLESS = 0  # in the place of a number of batches
_numbers = itertools.count(1)


class Announced(NamedTuple):
    """What a process says of a call that it makes.

    Attributes:
      name: of the call.
      looks: whether its callbacks look at batches.
      seed: TensorFlow's global seed, if one was set.
      drawn: a seed, for the case that none was.
    """

    name: str
    looks: bool
    seed: int | None
    drawn: int


def announce(group: Group, mine: Announced, deadline: float) -> list[Announced]:
    """Returns what every process says when all have come to the same call.

    Args:
      group: of the job's processes.
      mine: what this one says.
      deadline: in seconds, from when this process comes.

    Raises:
      InputError: processes have come to different calls.
      PeerLostError: one did not come in time, or is lost.
    """
    number = next(_numbers)
    try:
        everyone = [Announced(*said) for said in group.gather(f"call {number} of Keras", mine, deadline)]
    except PeerLostError as error:
        raise PeerLostError(f"{mine.name} is a call for every process, and not all have made it: {error}") from error
    if len({each.name for each in everyone}) > 1:
        said = ", ".join(f"rank {rank} {each.name}" for rank, each in enumerate(everyone))
        raise InputError(
            f"Every process makes the same calls of Keras, in the same order. Received as call {number}: {said}. "
            "Leave out conditions on the rank around them."
        )
    return everyone


def bound(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call by their names, with defaults."""
    given = inspect.signature(method).bind(*args, **kwargs)
    given.apply_defaults()
    return given


def passes(given: dict[str, Any]) -> list[int | None]:
    """How many batches a call of Keras takes in each pass over its data, and over its validation data if it has such.

    Args:
      given: the call's arguments.

    Returns:
      Numbers, None where one is not known before, or `ENDLESS`.
    """
    x, batch_size = given["x"], given.get("batch_size")
    steps = given.get("steps_per_epoch") or given.get("steps")
    of_validation = given.get("validation_steps"), given.get("validation_batch_size") or batch_size
    size = _size(x)
    if given.get("validation_data") is not None:
        other, *_ = keras.utils.unpack_x_y_sample_weight(given["validation_data"])
        return [_batches(x, size, steps, batch_size), _batches(other, _size(other), *of_validation)]
    if given.get("validation_split") and size:
        kept = math.floor(size * (1.0 - given["validation_split"]))
        return [_batches(x, kept, steps, batch_size), _batches(x, size - kept, *of_validation)]
    return [_batches(x, size, steps, batch_size)]


def _size(x: Any) -> int | None:
    """The rows of arrays; None for what is no array."""
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        return None
    return next((leaf.shape[0] for leaf in keras.tree.flatten(x) if hasattr(leaf, "shape") and len(leaf.shape)), None)


def _batches(x: Any, size: int | None, steps: int | None, batch_size: int | None) -> int | None:
    """How many batches a pass has: as many as are asked for, but no more than there are."""
    there = _there(x, size, batch_size)
    return min(int(steps), there or int(steps)) if steps else there


def _there(x: Any, size: int | None, batch_size: int | None) -> int | None:
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches
    if isinstance(x, tf.data.Dataset):
        known = int(x.cardinality())
        return ENDLESS if known == tf.data.INFINITE_CARDINALITY else known if known > 0 else None
    return math.ceil(size / (batch_size or 32)) if size is not None else None


def available(given: dict[str, Any]) -> int | None:
    """How many batches there are in the data of a call, whatever it says of steps: 0 if it has no end; None if unknown."""
    return _there(given["x"], _size(given["x"]), given.get("batch_size"))


def steps_at_a_time(batches: int | None, available: int | None, most: int) -> int:
    """How many steps one call of the compiled loop makes: a pass, and all data that there is, are whole numbers of calls.

    Args:
      batches: of a pass; None if not known.
      available: see `available`.
      most: steps.
    """
    if not batches or available is None:
        return 1
    return max(n for n in range(1, most + 1) if batches % n == 0 and available % n == 0)


def look_at_batches(callbacks: Sequence[keras.callbacks.Callback], training: bool) -> bool:
    """Whether a callback is told about single batches."""
    events = _TRAIN_EVENTS if training else _TEST_EVENTS
    return any(_own(callback, event) for callback in callbacks for event in events)


def _own(callback: keras.callbacks.Callback, event: str) -> bool:
    method = getattr(callback, event)
    return getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, event)


def with_agreement(
    callbacks: Sequence[keras.callbacks.Callback],
    strategy: Strategy,
    average: Callable[[], None],
    each_batch: bool,
    deadline: float,
) -> list[keras.callbacks.Callback]:
    """The callbacks of this process for `fit`: files by the chief, averaged statistics before them, one stop for all.

    Args:
      callbacks: as given on every process.
      strategy: where the model trains.
      average: makes moving statistics equal.
      each_batch: whether one of them may stop training behind a batch.
      deadline: in seconds, for processes whose callbacks take longer.
    """
    last = (_StopTogetherBehindBatches if each_batch else _StopTogether)(strategy.group, deadline)
    restored = [_RestoredTogether(strategy)] if strategy.cluster.size > 1 else []
    return [_Average(average), *chosen(callbacks, strategy, restores=True), *restored, last]


class _Average(keras.callbacks.Callback):
    """Comes first: what the others see or save at an epoch's end is the average over replicas."""

    def __init__(self, average: Callable[[], None]):
        super().__init__()
        self._average = average

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()


class _RestoredTogether(keras.callbacks.Callback):
    """What the chief's callback has restored, as `BackupAndRestore` does, every process goes on from."""

    def __init__(self, strategy: Strategy):
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: Any = None) -> None:
        epoch = keras_internals.initial_epoch(self.model)
        epoch = self._strategy.group.broadcast("restored", epoch, float("inf"))  # reading may last
        if epoch:
            keras_internals.set_initial_epoch(self.model, epoch)
            self._strategy.send_from_first([*self.model.variables, *self.model.optimizer.variables])


class _StopTogether(keras.callbacks.Callback):
    """Comes last: where a callback of any process wants training to stop, it stops on all."""

    def __init__(self, group: Group, deadline: float):
        super().__init__()
        self._group, self._deadline = group, deadline

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree(f"stop/epoch {epoch}")

    def _agree(self, name: str) -> None:
        self.model.stop_training = any(self._group.gather(name, bool(self.model.stop_training), self._deadline))


class _StopTogetherBehindBatches(_StopTogether):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree(f"stop/batch {batch}")
