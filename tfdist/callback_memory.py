"""What Keras callbacks know, as a checkpoint keeps it: how long `EarlyStopping` has waited, the best loss, the best weights."""

import collections
import copy
import hashlib
import logging
import re
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.callbacks import WRITE_FILES
from tfdist.checkpoint import Checkpoint, Damaged, Part
from tfdist.checkpoint.dtypes import DTYPES, is_known
from tfdist.group import Json
from tfdist.naming import numbered

_PREFIX = "callbacks/"
_OF_KERAS = frozenset(vars(keras.callbacks.Callback()))  # the model, and what `set_params` gives
_COUNTERS = ("_global_train_batch", "_global_test_batch")  # of TensorBoard; what else is private there is the process's
_WORDS = re.compile(r"[\w -]*")
_MOST_ITEMS = 10_000
_FEW_FLOATS = 100
_HASHED_BYTES = 2**26

_log = logging.getLogger(__name__)

_Mark = str | weakref.ref  # by which an array is known again: its hash, or, if it is large, itself


class Known(NamedTuple):
    """What callbacks know at one moment: as JSON, and the arrays that it names."""

    values: Json
    parts: list[Part]


NOTHING = Known({}, [])


class _Held(NamedTuple):
    """A value as JSON, and the arrays in it by the names that stand for them there."""

    value: Json
    arrays: dict[str, np.ndarray]


class _Start(NamedTuple):
    """A value as it was before the run."""

    value: Json
    marks: dict[str, _Mark]


class CallbackMemory:
    """Attributes of a run's callbacks that have changed since before it began.

    They are numbers, words, arrays, and lists, tuples and dicts of them. An attribute that holds anything else begins anew:
    so does a text that could name a file, as a stranger's checkpoint must not say where files are written, and a list or
    dict of more than 10,000 items that are not all floats. What the program gave a callback and nothing has changed is not
    kept, so that it may be given otherwise when the run goes on. An array of more than 64 MiB that was there before counts
    as changed if it is another one.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        self._start: dict[str, dict[str, _Start]] = {}
        self._restored: dict[str, dict[str, Any]] | None = None  # what the next run begins with
        self._known: dict[str, dict[str, Any]] | None = None  # what this one began with
        self._rate: float | None = None
        self._said: set[str] = set()

    def attend(self, callbacks: Sequence[keras.callbacks.Callback], optimizer: keras.Optimizer) -> None:
        """Takes the callbacks of this process's run, before they hear that it begins."""
        self._callbacks = numbered((_kind(callback), callback) for callback in callbacks)
        self._start = {
            name: {
                attribute: _Start(held.value, {key: _mark(array) for key, array in held.arrays.items()})
                for attribute, held in _attributes(name, callback)
            }
            for name, callback in self._callbacks.items()
        }
        self._known, self._restored = self._restored, None
        self._optimizer, self._rate = optimizer, keras_internals.constant_learning_rate(optimizer)

    def begun(self) -> None:
        """They have heard that the run begins, which makes them forget."""
        self._go_on()

    def epoch_begun(self, again: bool) -> None:
        """They have heard that an epoch begins; `again` if they had heard it in the run before, too."""
        if again:
            self._go_on()
        self._known = None

    @property
    def goes_on(self) -> bool:
        """Whether there was a run before; of use until the first epoch begins."""
        return self._known is not None

    @property
    def is_over(self) -> bool:
        """Whether `EarlyStopping` had stopped the run that goes on, and would again."""
        return any(
            isinstance(callback, keras.callbacks.EarlyStopping)
            and callback.stopped_epoch > 0
            and callback.wait >= callback.patience
            for callback in self._callbacks.values()
        )

    def now(self) -> Known:
        """What they know; arrays are copied."""
        values: dict[str, Any] = {}
        arrays: dict[str, np.ndarray] = {}
        for name, callback in self._callbacks.items():
            all_held = dict(_attributes(name, callback))
            self._warn(name, callback, kept=all_held)
            held = {key: one for key, one in all_held.items() if self._has_changed(name, key, one)}
            values[name] = {key: one.value for key, one in held.items()}
            arrays.update(item for one in held.values() for item in one.arrays.items())
        return Known(values, [Part.whole(name, np.array(array, order="C")) for name, array in arrays.items()])

    def restore(self, checkpoint: Checkpoint) -> None:
        """Reads what the callbacks of another run knew, for the next one to go on with.

        Raises:
          Damaged: it is not what `now` returns.
        """
        saved = checkpoint.values.get("callbacks", {})  # a checkpoint of a version without it has none
        names = {name for name in checkpoint.tensors if name.startswith(_PREFIX)}

        def read(name: str) -> np.ndarray:
            names.remove(name)  # each is there for one place
            return np.array(checkpoint.read(name))

        try:
            self._restored = {
                name: {attribute: _decoded(value, read) for attribute, value in attributes.items()}
                for name, attributes in saved.items()
            }
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Damaged(checkpoint.path, f"what it has of callbacks is not understood ({error})") from error

    def _go_on(self) -> None:
        """Gives the callbacks what those of the run before knew, and the optimizer its rate, if there was a run before.

        Both are as if the callbacks had not heard of this beginning: they had, in the run before.
        """
        if self._known is None:
            return
        if self._rate is not None and keras_internals.constant_learning_rate(self._optimizer) is not None:
            self._optimizer.learning_rate = self._rate
        for name, known in self._known.items():
            if name in self._callbacks:
                self._put_back(name, known)

    def _put_back(self, name: str, known: Mapping[str, Any]) -> None:
        callback, start = self._callbacks[name], self._start[name]
        for attribute, _ in _attributes(name, callback):
            if attribute in start and not start[attribute].marks:  # what was not kept was as it had been given
                setattr(callback, attribute, _decoded(start[attribute].value))
        for attribute, value in known.items():
            if _is_kept(callback, attribute, value):
                setattr(callback, attribute, copy.deepcopy(value))

    def _has_changed(self, name: str, attribute: str, held: _Held) -> bool:
        start = self._start[name].get(attribute)
        return (
            start is None
            or start.value != held.value
            or not all(_is_marked(start.marks[key], array) for key, array in held.arrays.items())
        )

    def _warn(self, name: str, callback: keras.callbacks.Callback, kept: Container[str]) -> None:
        """Says once of each attribute that looks like state of a program's own callback and cannot be kept."""
        if type(callback).__module__.startswith("keras."):
            return
        for attribute, value in dict(vars(callback)).items():
            said = f"{name}.{attribute}"
            looks_like_state = isinstance(value, list | tuple | dict | set | collections.deque) and value
            if (
                looks_like_state
                and attribute not in kept
                and said not in self._said
                and _is_kept(callback, attribute, value)
            ):
                self._said.add(said)
                _log.warning(
                    "%s begins anew when the run goes on: a checkpoint keeps numbers, words, arrays, and plain lists, tuples "
                    "and dicts of them, not this %s.", said, type(value).__name__
                )  # fmt: skip


def _kind(callback: keras.callbacks.Callback) -> str:
    """What it is, and what it watches."""
    monitor = getattr(callback, "monitor", None)
    return type(callback).__name__ + (f":{monitor}" if isinstance(monitor, str) else "")


def _attributes(name: str, callback: keras.callbacks.Callback) -> Iterator[tuple[str, _Held]]:
    """What one callback has that can be kept, by attribute."""
    for attribute, value in dict(vars(callback)).items():
        if _is_kept(callback, attribute, value):
            try:
                yield attribute, _encoded(value, f"{_PREFIX}{name}/{attribute}")
            except (TypeError, RecursionError):  # it is more than data
                continue


def _is_kept(callback: keras.callbacks.Callback, attribute: str, value: Any) -> bool:
    """Whether an attribute can be state, by its name and by what its callback does."""
    in_class = getattr(type(callback), attribute, None)
    is_of_the_process = isinstance(callback, keras.callbacks.TensorBoard) and attribute.startswith("_")
    names_a_file = isinstance(callback, WRITE_FILES) and isinstance(value, str)
    # Its sign goes with a function that Keras makes anew.
    is_half = attribute == "min_delta" and hasattr(callback, "monitor_op")
    return not (
        attribute in _OF_KERAS
        or attribute.startswith("__")
        or (is_of_the_process and attribute not in _COUNTERS)
        or names_a_file
        or is_half
        or callable(in_class)
        or hasattr(in_class, "__set__")
    )


def _encoded(value: Any, name: str) -> _Held:
    """Raises TypeError for what is not data; `name` is that of its array, or begins the names of those in it."""
    if value is None or type(value) in (bool, int) or (type(value) is str and _WORDS.fullmatch(value)):
        return _Held(value, {})
    if type(value) is float:  # JSON has no inf and no NaN
        return _Held({"float": value.hex()}, {})
    if isinstance(value, np.generic) and is_known(value.dtype):
        return _Held({"scalar": value.dtype.name, "value": _encoded(value.item(), name).value}, {})
    if type(value) is np.ndarray and is_known(value.dtype):
        return _Held({"array": name}, {name: value})
    if type(value) is list:
        return _sequence(value, name)
    if type(value) is tuple:
        held = _sequence([*value], name)
        return held._replace(value={"tuple": held.value})
    if type(value) is dict:
        keys = [{"key": key} if type(key) is str else _encoded(key, "").value for key in value]
        held = _sequence([*value.values()], name)
        return held._replace(value={"dict": held.value, "keys": keys})
    raise TypeError


def _sequence(values: list[Any], name: str) -> _Held:
    if len(values) > _FEW_FLOATS and all(type(value) is float for value in values):
        return _Held({"floats": name}, {name: np.array(values)})
    if len(values) > _MOST_ITEMS:
        raise TypeError
    held = [_encoded(value, f"{name}/{number}") for number, value in enumerate(values)]
    return _Held([one.value for one in held], {key: array for one in held for key, array in one.arrays.items()})


def _no_array(name: str) -> np.ndarray:
    raise KeyError(name)


def _decoded(value: Any, read: Callable[[str], np.ndarray] = _no_array) -> Any:
    """What `_encoded` was given; `read` returns the array of a name."""
    if isinstance(value, list):
        return [_decoded(item, read) for item in value]
    if isinstance(value, str) and not _WORDS.fullmatch(value):
        raise ValueError(f"{value!r} could name a file")
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if "scalar" in value:
        return DTYPES[value["scalar"]].type(_decoded(value["value"], read))
    if "array" in value:
        return read(value["array"])
    if "floats" in value:
        return read(value["floats"]).tolist()
    if "tuple" in value:
        return tuple(_decoded(value["tuple"], read))
    keys = [_key(key) for key in value["keys"]]
    return dict(zip(keys, _decoded(value["dict"], read), strict=True))


def _key(value: Any) -> Any:
    """A dict's key: any text, which names no file, or what `_decoded` knows without arrays."""
    return str(value["key"]) if isinstance(value, dict) and "key" in value else _decoded(value)


def _mark(array: np.ndarray) -> _Mark:
    return _hash(array) if array.nbytes <= _HASHED_BYTES else weakref.ref(array)


def _is_marked(mark: _Mark, array: np.ndarray) -> bool:
    if isinstance(mark, weakref.ref):
        return mark() is array
    return array.nbytes <= _HASHED_BYTES and _hash(array) == mark


def _hash(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
