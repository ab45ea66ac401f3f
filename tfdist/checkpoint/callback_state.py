"""State of Keras callbacks in checkpoints: how long `EarlyStopping` has waited, the best loss, the best weights."""

import collections
import copy
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.checkpoint.callback_values import Held, array_fingerprint, decoded, encoded, fill, fingerprint, is_like
from tfdist.checkpoint.format import Checkpoint, Damaged, Part
from tfdist.coordination import Group, Json
from tfdist.grammar.unique_names import unique_names
from tfdist.step.callbacks import WRITE_FILES

_PREFIX = "callbacks/"
_OF_KERAS = frozenset(vars(keras.callbacks.Callback()))  # the model, and the arguments of `set_params`
# Of TensorBoard; its other private attributes belong to the process.
_COUNTERS = ("_global_train_batch", "_global_test_batch")
_HASHED_BYTES = 2**26
_MANY_BYTES = 2**26

_log = logging.getLogger(__name__)

_Mark = str | weakref.ref  # identifies an array: its hash or, for a large array, a reference to it


class Known(NamedTuple):
    """State of callbacks at one moment: JSON values, and the arrays to which they refer."""

    values: Json
    parts: list[Part]


NOTHING = Known({}, [])


class _Start(NamedTuple):
    """The value of an attribute before the run."""

    value: Json
    marks: dict[str, _Mark]


class CallbackState:
    """The attributes of a run's callbacks that have changed since before it began.

    Saved are numbers, words, arrays, and lists, tuples and dicts of them. An attribute with anything else is not saved,
    and starts anew. For security, because a checkpoint from an untrusted source must not determine where files are
    written, this includes a text that could be a file name, and a dict with a key that could name a file outside of the
    working directory. It also includes a list or dict of more than 10,000 items that are not all floats. Unchanged
    values that the program passed to a callback are not saved either, so that the program may pass other ones when the
    run resumes. An array of more than 64 MiB that existed before counts as changed if it is another object.

    Lists, dicts and arrays that the program passed are restored in place, because other callbacks, and the program, may
    also refer to them.
    """

    def __init__(self) -> None:
        """Initializes without callbacks or state."""
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        self._start: dict[str, dict[str, _Start]] = {}
        self._restored: dict[str, dict[str, Any]] | None = None  # the state with which the next run begins
        self._known: dict[str, dict[str, Any]] | None = None  # the state with which this run began
        self._own: set[tuple[str, str]] = set()  # attributes that are specific to this process
        self._given: dict[tuple[str, str], Any] = {}  # values passed by the program; until the first epoch has begun
        self._filled: dict[int, str] = {}  # by id of an object, the fingerprint of the value restored into it
        self._rate: float | None = None
        self._said: set[str] = set()

    def attend(self, callbacks: Sequence[keras.callbacks.Callback], optimizer: keras.Optimizer) -> None:
        """Registers the callbacks of this process's run, before their `on_train_begin`."""
        self._callbacks = unique_names((_kind(callback), callback) for callback in callbacks)
        self._start = {
            name: {
                attribute: _Start(held.value, {key: _mark(array) for key, array in held.arrays.items()})
                for attribute, held in _attributes(name, callback)
            }
            for name, callback in self._callbacks.items()
        }
        self._known, self._restored = self._restored, None
        self._given = {
            (name, attribute): value
            for name, callback in (self._callbacks.items() if self.goes_on else ())
            for attribute, value in vars(callback).items()
        }
        self._optimizer, self._rate = optimizer, keras_internals.constant_learning_rate(optimizer)

    def begun(self, group: Group) -> None:
        """Restores the callbacks after `on_train_begin`, which resets them; every process must call it.

        Attributes that they have then set to other values than on the chief, such as the rank, are specific to this
        process, and are not restored.
        """
        if self._known is not None:
            noted = {
                (name, key): fingerprint(held)
                for name, c in self._callbacks.items()
                for key, held in _attributes(name, c)
            }
            said = [[*place, text] for place, text in noted.items()]
            chiefs = group.broadcast("callbacks/begun", said, deadline=float("inf"))  # a callback may take long
            differ = {(name, key) for name, key, text in chiefs if noted.get((name, key), text) != text}
            self._own = differ if group.rank else set()
        self._go_on()

    def epoch_begun(self, again: bool) -> None:
        """Restores the callbacks after `on_epoch_begin`, if the epoch had begun in the run before (`again`)."""
        if again:
            self._go_on()
        self._known, self._given = None, {}

    @property
    def goes_on(self) -> bool:
        """Whether there was a run before; valid until the first epoch begins."""
        return self._known is not None

    @property
    def is_over(self) -> bool:
        """Whether `EarlyStopping` had stopped the run that resumes, and would do so again."""
        return any(
            isinstance(callback, keras.callbacks.EarlyStopping)
            and callback.stopped_epoch > 0
            and callback.wait >= callback.patience
            for callback in self._callbacks.values()
        )

    def now(self) -> Known:
        """Returns the current state, with copies of arrays."""
        values: dict[str, Any] = {}
        arrays: dict[str, np.ndarray] = {}
        for name, callback in self._callbacks.items():
            all_held = dict(_attributes(name, callback))
            held = {key: one for key, one in all_held.items() if self._has_changed(name, key, one)}
            self._warn(name, callback, all_held, held)
            values[name] = {key: one.value for key, one in held.items()}
            arrays.update(item for one in held.values() for item in one.arrays.items())
        return Known(values, [Part.whole(name, np.array(array, order="C")) for name, array in arrays.items()])

    def restore(self, checkpoint: Checkpoint) -> None:
        """Reads the callbacks' state from a checkpoint, for the next run to resume with.

        Raises:
          Damaged: it is not what `now` returns.
        """
        saved = checkpoint.values.get("callbacks", {})  # missing in checkpoints of older versions
        names = {name for name in checkpoint.tensors if name.startswith(_PREFIX)}

        def read(name: str) -> np.ndarray:
            names.remove(name)  # each array is used once
            return np.array(checkpoint.read(name))

        try:
            self._restored = {
                name: {attribute: decoded(value, read) for attribute, value in attributes.items()}
                for name, attributes in saved.items()
            }
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Damaged(checkpoint.path, f"its values of callbacks are not understood ({error})") from error

    def _go_on(self) -> None:
        """Restores the callbacks' state and the optimizer's learning rate, if there was a run before.

        The result is as if the callbacks had not been notified of this beginning, of which they had been notified in
        the run before.
        """
        if self._known is None:
            return
        if self._rate is not None and keras_internals.constant_learning_rate(self._optimizer) is not None:
            self._optimizer.learning_rate = self._rate
        self._filled = {}
        for name, known in self._known.items():
            if name in self._callbacks:
                self._put_back(name, known)

    def _put_back(self, name: str, known: Mapping[str, Any]) -> None:
        callback, start = self._callbacks[name], self._start[name]
        for attribute, _ in _attributes(name, callback):
            # An attribute that was not saved had its initial value; but callbacks that write files record which ones
            # they find.
            was_given = attribute in start and attribute not in known and not isinstance(callback, WRITE_FILES)
            if was_given and not start[attribute].marks:
                self._set(name, attribute, decoded(start[attribute].value))
        for attribute, value in known.items():
            if _is_kept(callback, attribute, value):
                self._set(name, attribute, copy.deepcopy(value))

    def _set(self, name: str, attribute: str, value: Any) -> None:
        """Sets an attribute of a callback, in place if it still has the object that the program passed."""
        if (name, attribute) in self._own:
            return
        present = vars(self._callbacks[name]).get(attribute)
        if isinstance(present, list | dict | np.ndarray) and present is self._given.get((name, attribute)):
            wanted = fingerprint(encoded(value, ""))
            # Attributes that shared an object may have diverged.
            is_free = self._filled.setdefault(id(present), wanted) == wanted
            if is_free and (is_like(present, wanted) or fill(present, value)):
                return
        setattr(self._callbacks[name], attribute, value)

    def _has_changed(self, name: str, attribute: str, held: Held) -> bool:
        start = self._start[name].get(attribute)
        return (
            start is None
            or start.value != held.value
            or not all(_is_marked(start.marks[key], array) for key, array in held.arrays.items())
        )

    def _warn(
        self, name: str, callback: keras.callbacks.Callback, all_held: Mapping[str, Held], held: Mapping[str, Held]
    ) -> None:
        """Warns once per attribute of a user's callback that looks like state but cannot be saved, or is large."""
        if type(callback).__module__.startswith("keras."):
            return
        for attribute, value in dict(vars(callback)).items():
            looks_like_state = isinstance(value, list | tuple | dict | set | collections.deque) and value
            if looks_like_state and attribute not in all_held and _is_kept(callback, attribute, value):
                self._say(
                    f"{name}.{attribute}", "is not saved, and starts anew when the run resumes: checkpoints keep "
                    "numbers, words, arrays, and "
                    f"plain lists, tuples and dicts of them, but not this {type(value).__name__}."
                )  # fmt: skip
        for attribute, one in held.items():
            size = sum(array.nbytes for array in one.arrays.values())
            if size > _MANY_BYTES:
                self._say(
                    f"{name}.{attribute}", f"has {size / 2**20:.0f} MiB, which each checkpoint and commit copies and writes. "
                    "If it is not state, give it to the callback before the run."
                )  # fmt: skip

    def _say(self, of: str, text: str) -> None:
        if of not in self._said:
            self._said.add(of)
            _log.warning("%s %s", of, text)


def _kind(callback: keras.callbacks.Callback) -> str:
    """Returns the class of a callback and the metric that it monitors."""
    monitor = getattr(callback, "monitor", None)
    return type(callback).__name__ + (f":{monitor}" if isinstance(monitor, str) else "")


def _attributes(name: str, callback: keras.callbacks.Callback) -> Iterator[tuple[str, Held]]:
    """Yields the attributes of a callback that can be saved."""
    for attribute, value in dict(vars(callback)).items():
        if _is_kept(callback, attribute, value):
            try:
                yield attribute, encoded(value, f"{_PREFIX}{name}/{attribute}")
            except (TypeError, RecursionError):  # not plain data
                continue


def _is_kept(callback: keras.callbacks.Callback, attribute: str, value: Any) -> bool:
    """Returns whether an attribute can be state, by its name and the type of its callback."""
    in_class = getattr(type(callback), attribute, None)
    is_of_the_process = isinstance(callback, keras.callbacks.TensorBoard) and attribute.startswith("_")
    names_a_file = isinstance(callback, WRITE_FILES) and isinstance(value, str)
    # Its sign depends on `monitor_op`, which Keras creates anew.
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


def _mark(array: np.ndarray) -> _Mark:
    return array_fingerprint(array) if array.nbytes <= _HASHED_BYTES else weakref.ref(array)


def _is_marked(mark: _Mark, array: np.ndarray) -> bool:
    if isinstance(mark, weakref.ref):
        return mark() is array
    return array.nbytes <= _HASHED_BYTES and array_fingerprint(array) == mark
