"""Saves and restores the state of Keras callbacks, such as the best weights of `EarlyStopping`."""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, TensorBlock
from tfdist.checkpoint.format.files import DTYPES, is_supported_dtype
from tfdist.config.spec import unique_names
from tfdist.coordination import Json
from tfdist.errors import InputError

_STATE_DICT = "state_dict()"  # key in a saved state of the result of `state_dict()`; other keys are attribute names
_log = logging.getLogger(__name__)


def encode_value(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Json:
    """Encodes a value as JSON; adds its arrays to `arrays`, and refers to them by names that begin with `name`.

    Raises:
      TypeError: the value does not consist of numbers, strings, None, arrays, tensors, and lists, tuples and dicts of these.
      RecursionError: the value contains itself.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": value.hex()}  # JSON has neither inf nor NaN
    if type(value) in (list, tuple):
        items = [encode_value(item, f"{name}/{index}", arrays) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        return {
            "dict": encode_value([*value.values()], name, arrays),
            "keys": [encode_value(key, name, {}) for key in value],
        }
    array = np.asarray(value) if hasattr(value, "__array__") else None
    if array is None or not is_supported_dtype(array.dtype):
        raise TypeError(f"{value!r:.60} of type {type(value).__name__}")
    if not array.ndim:
        return {"scalar": array.dtype.name, "value": encode_value(array.item(), name, arrays)}
    arrays[name] = array
    return {"array": name}


def decode_value(value: Any, read: Callable[[str], np.ndarray]) -> Any:
    """Decodes the result of `encode_value`; `read` returns an array by name.

    Raises:
      ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError: `value` is not such a result.
    """
    if isinstance(value, list):
        return [decode_value(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if "scalar" in value:
        return DTYPES[value["scalar"]].type(decode_value(value["value"], read))
    if "array" in value:
        return read(value["array"])
    if "tuple" in value:
        return tuple(decode_value(value["tuple"], read))
    return dict(zip(decode_value(value["keys"], read), decode_value(value["dict"], read), strict=True))


class CallbackStates:
    """Saves and restores the state of a run's callbacks, by name.

    The state of a callback is the result of its `state_dict()`, which `load_state_dict` receives when a run resumes. The
    state of Keras's callbacks and their subclasses includes the attributes in `keras_internals.callback_state`.
    """

    def __init__(self, is_chief: bool):
        """Initializes without callbacks; only rank 0 (`is_chief`) saves the states."""
        self._is_chief = is_chief
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        # States to restore in the next run, and states to restore in this run until its first epoch begins.
        self._next_states: dict[str, dict[str, Any]] | None = None
        self._restored_states: dict[str, dict[str, Any]] | None = None
        self._learning_rate: float | None = None
        # Names and ids of attributes after `on_train_begin`, for callbacks without saved state, to detect later changes.
        self._unsaved_attributes: dict[str, set[tuple[str, int]]] = {}

    def start(self, callbacks: Sequence[keras.callbacks.Callback], optimizer: keras.Optimizer) -> None:
        """Registers the callbacks of a run, before their `on_train_begin`."""
        self._callbacks = unique_names((_callback_name(callback), callback) for callback in callbacks)
        self._restored_states, self._next_states = self._next_states, None
        self._optimizer, self._learning_rate = optimizer, keras_internals.constant_learning_rate(optimizer)

    def after_train_begin(self) -> None:
        """Restores the callbacks; called after `on_train_begin`, in which Keras's callbacks reset their state."""
        self._load()
        states = self._restored_states or {}
        ignored_names = [name for name, state in states.items() if state and not self._is_restored(name, state)]
        if ignored_names and self._is_chief:
            _log.warning(
                "These callback states in the checkpoint are not restored: %s. Either this run has no callback of that "
                "name, or the callback has no load_state_dict method.",
                ", ".join(ignored_names),
            )
        self._unsaved_attributes = {
            name: _attribute_ids(callback)
            for name, callback in self._callbacks.items()
            if self._is_chief and not _has_state_dict(callback) and not _is_keras_callback(callback)
        }

    def after_epoch_begin(self, is_resumed: bool) -> None:
        """Called after `on_epoch_begin`. If the resumed run had already begun this epoch, restores the callbacks again."""
        if is_resumed:
            self._load()
        self._restored_states = None

    @property
    def resumes(self) -> bool:
        """Whether this run resumes another one; valid until its first epoch begins."""
        return self._restored_states is not None

    @property
    def is_over(self) -> bool:
        """Whether `EarlyStopping` had stopped the resumed run and would stop it again."""
        return any(
            isinstance(callback, keras.callbacks.EarlyStopping)
            and callback.stopped_epoch > 0
            and callback.wait >= callback.patience
            for callback in self._callbacks.values()
        )

    def save(self) -> tuple[Json, list[TensorBlock]]:
        """Returns the current states as JSON and, on rank 0, copies of their arrays; every process must call this.

        Raises:
          InputError: a callback's state, such as the result of its `state_dict`, cannot be saved.
        """
        unsaved = self._unsaved_attributes
        if names := [name for name, ids in unsaved.items() if _attribute_ids(self._callbacks[name]) != ids]:
            self._unsaved_attributes = {}
            _log.warning(
                "Checkpoints do not contain the attributes of %s: a resumed run starts with their initial values. To save "
                "and restore its state, a callback needs the methods state_dict and load_state_dict.",
                ", ".join(names),
            )
        arrays: dict[str, np.ndarray] = {}
        values = {name: _encode_state(name, callback, arrays) for name, callback in self._callbacks.items()}
        saved_arrays = arrays if self._is_chief else {}
        return values, [TensorBlock.full(name, np.array(array, order="C")) for name, array in saved_arrays.items()]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Reads callback states from a checkpoint for the next run; raises `CorruptCheckpointError` if they are invalid."""
        states = checkpoint.values["callbacks"]
        try:
            self._next_states = {
                name: {key: decode_value(value, checkpoint.read) for key, value in state.items()}
                for name, state in states.items()
            }
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(checkpoint.path, f"its callback state cannot be read ({error})") from error

    def _load(self) -> None:
        """Restores the callbacks, and the learning rate, which they may have set."""
        if self._restored_states is None:
            return
        if self._learning_rate is not None and keras_internals.constant_learning_rate(self._optimizer) is not None:
            self._optimizer.learning_rate = self._learning_rate
        for name, callback in self._callbacks.items():
            state = copy.deepcopy(self._restored_states.get(name, {}))  # callbacks may modify it
            keras_internals.restore_callback(callback, state)
            if _STATE_DICT in state and _has_state_dict(callback):
                callback.load_state_dict(state[_STATE_DICT])

    def _is_restored(self, name: str, state: Mapping[str, Any]) -> bool:
        accepts = _has_state_dict if _STATE_DICT in state else _is_keras_callback
        return name in self._callbacks and accepts(self._callbacks[name])


def _callback_name(callback: keras.callbacks.Callback) -> str:
    monitor = getattr(callback, "monitor", None)
    return type(callback).__name__ + (f":{monitor}" if isinstance(monitor, str) else "")


def _has_state_dict(callback: keras.callbacks.Callback) -> bool:
    return all(callable(getattr(callback, method, None)) for method in ("state_dict", "load_state_dict"))


def _is_keras_callback(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is from Keras, or of a subclass of a Keras callback with state."""
    return type(callback).__module__.startswith("keras.") or bool(keras_internals.callback_state(callback))


def _attribute_ids(callback: keras.callbacks.Callback) -> set[tuple[str, int]]:
    return {(name, id(value)) for name, value in vars(callback).items()}


def _encode_state(name: str, callback: keras.callbacks.Callback, arrays: dict[str, np.ndarray]) -> dict[str, Json]:
    state = keras_internals.callback_state(callback)
    if _has_state_dict(callback):
        state[_STATE_DICT] = callback.state_dict()
        if type(state[_STATE_DICT]) is not dict:
            raise InputError(f"state_dict() must return a dict. Received, from {name}: {state[_STATE_DICT]!r:.60}.")
    try:
        return {key: encode_value(value, f"callbacks/{name}/{key}", arrays) for key, value in state.items()}
    except (RecursionError, TypeError) as error:
        raise InputError(
            "The state of a callback must consist of numbers, strings, None, arrays, and lists, tuples and dicts of "
            f"these. Received, from {name}: {error}. Convert it in state_dict."
        ) from error
