"""Checks that all processes call the same Keras methods, in the same order, and synchronizes their callbacks."""

import inspect
import itertools
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, PeerLostError
from tfdist.trainer.callbacks import callbacks_of_process

_BATCH_EVENTS = ("on_batch_begin", "on_batch_end")
_TRAIN_EVENTS = (*_BATCH_EVENTS, "on_train_batch_begin", "on_train_batch_end")
_TEST_EVENTS = ("on_test_batch_begin", "on_test_batch_end")
LENGTH_ARGUMENTS = ("epochs", "initial_epoch", "validation_freq")  # numbers of batches are compared with the data
INFINITE = 0  # number of batches of infinite data
_call_ids = itertools.count(1)


def announce(strategy: Strategy, name: str, inspects_batches: bool, deadline: float) -> bool:
    """Waits until all processes have made the same call; sets the same seed, with which Keras shuffles arrays, on all of them.

    Returns whether callbacks of any process inspect batches. Raises `InputError` if processes have made different calls, and
    `PeerLostError` if a process is lost or has not made the call within `deadline` seconds.
    """
    number, seed = next(_call_ids), keras_internals.global_seed()
    call = [name, inspects_batches, secrets.randbelow(2**31) if seed is None else seed]
    try:
        calls: list[Any] = strategy.group.gather(f"call {number} of Keras", call, deadline)
    except PeerLostError as error:
        raise PeerLostError(f"Every process must call {name}, but not all did: {error}") from error
    names = [rank_name for rank_name, *_ in calls]
    if len(set(names)) > 1:
        received = ", ".join(f"rank {rank} {rank_name}" for rank, rank_name in enumerate(names))
        raise InputError(
            f"Every process must make the same calls of Keras, in the same order. Received as call {number}: {received}. "
            "Do not make them conditional on the rank."
        )
    common_seed = calls[0][2]
    if strategy.cluster.size > 1 and seed != common_seed:
        tf.random.set_seed(common_seed)
    return any(rank_inspects for _, rank_inspects, _ in calls)


def bound_arguments(method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Returns the arguments of a call by name, with defaults."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def batches_per_pass(arguments: dict[str, Any]) -> list[int | None]:
    """Returns the number of batches per pass over the data of a call and, if there is any, over its validation data.

    An element is None if the number is unknown, and `INFINITE` for infinite data.
    """
    x, (steps, batch_size) = arguments["x"], _steps_and_batch_size(arguments)
    validation = arguments.get("validation_steps"), arguments.get("validation_batch_size") or batch_size
    size = _count_rows(x)
    validation_x, validation_size = None, size
    if arguments.get("validation_data") is not None:
        validation_x, *_ = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
        validation_size = _count_rows(validation_x)
    elif arguments.get("validation_split") and size:
        train_size = math.floor(size * (1.0 - arguments["validation_split"]))
        validation_x, validation_size, size = x, size - train_size, train_size
    counts = [_count_batches(x, size, steps, batch_size)]
    return counts if validation_x is None else [*counts, _count_batches(validation_x, validation_size, *validation)]


def _steps_and_batch_size(arguments: dict[str, Any]) -> tuple[int | None, int | None]:
    """Returns the number of steps in a pass and the batch size; None for an argument that was not passed."""
    return arguments.get("steps_per_epoch") or arguments.get("steps"), arguments.get("batch_size")


def _count_rows(x: Any) -> int | None:
    """Returns the number of rows of arrays; None for other data."""
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        return None
    return next((leaf.shape[0] for leaf in keras.tree.flatten(x) if hasattr(leaf, "shape") and len(leaf.shape)), None)


def _count_batches(x: Any, size: int | None, steps: int | None, batch_size: int | None) -> int | None:
    cardinality = _cardinality(x, size, steps, batch_size)
    return min(int(steps), cardinality or int(steps)) if steps else cardinality


def _cardinality(x: Any, size: int | None, steps: int | None, batch_size: int | None) -> int | None:
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches
    if isinstance(x, tf.data.Dataset):
        count = int(x.cardinality())
        return INFINITE if count == tf.data.INFINITE_CARDINALITY else count if count > 0 else None
    if size is None:
        return None
    rows = batch_size or (math.ceil(size / steps) if steps else 32)  # as in Keras
    return math.ceil(size / rows) if size else 0


def cardinality(arguments: dict[str, Any]) -> int | None:
    """Returns the number of batches in the data of a call, regardless of `steps`: 0 if infinite, None if unknown."""
    return _cardinality(arguments["x"], _count_rows(arguments["x"]), *_steps_and_batch_size(arguments))


def steps_per_call(batches: int | None, cardinality: int | None, limit: int) -> int:
    """Returns the largest number of steps per call of the compiled loop, up to `limit`, that divides a pass and the data."""
    if not batches or cardinality is None:
        return 1
    return max(n for n in range(1, limit + 1) if batches % n == 0 and cardinality % n == 0)


def have_batch_hooks(callbacks: Sequence[keras.callbacks.Callback], training: bool) -> bool:
    """Returns whether a callback handles events of batches; a callback that saves at the end of epochs does not."""
    batch_callbacks = [callback for callback in callbacks if getattr(callback, "save_freq", None) != "epoch"]
    pairs = itertools.product(batch_callbacks, _TRAIN_EVENTS if training else _TEST_EVENTS)
    methods = [(getattr(callback, event), getattr(keras.callbacks.Callback, event)) for callback, event in pairs]
    return any(getattr(method, "__func__", method) is not original for method, original in methods)


def synchronize_callbacks(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    strategy: Strategy,
    average: Callable[[], None],
    stops_after_batches: bool,
    deadline: float,
) -> list[keras.callbacks.Callback]:
    """Returns this process's callbacks for `fit`: the first calls `average`, and the last agrees on whether to stop.

    `stops_after_batches` indicates whether a callback may stop training after any batch. `deadline` is the maximum number of
    seconds to wait for processes whose callbacks take longer.
    """

    def broadcast_state(logs: Any) -> None:
        """Broadcasts the state that the chief's callbacks, such as `BackupAndRestore`, have restored."""
        epoch = keras_internals.initial_epoch(model)
        epoch = strategy.group.broadcast("restored", epoch, float("inf"))  # reading a file may take long
        if epoch:
            keras_internals.set_initial_epoch(model, epoch)
            strategy.adoption.broadcast_values([*model.variables, *model.optimizer.variables])

    def agree(event: str) -> None:
        model.stop_training = any(strategy.group.gather(f"stop/{event}", bool(model.stop_training), deadline))

    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: agree(f"epoch {epoch}"),
        on_train_batch_end=(lambda batch, logs: agree(f"batch {batch}")) if stops_after_batches else None,
    )
    return [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: average()),
        *callbacks_of_process(callbacks, strategy, broadcasts_weights=True),
        *([keras.callbacks.LambdaCallback(on_train_begin=broadcast_state)] if strategy.cluster.size > 1 else []),
        stop,
    ]
