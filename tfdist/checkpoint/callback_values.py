"""Values of callbacks' attributes as JSON and arrays, and back: data alone, of which a stranger's names no file."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tfdist.checkpoint.storage.dtypes import DTYPES, is_known
from tfdist.coordination import Json

_WORDS = re.compile(r"[\w -]*")
_ELSEWHERE = re.compile(r"[/~]|.*(\\|\.\.|:/)", re.DOTALL)  # the name of a file that may not be in this directory
_MOST_ITEMS = 10_000
_FEW_FLOATS = 100


class Held(NamedTuple):
    """A value as JSON, and the arrays in it by the names that stand for them there."""

    value: Json
    arrays: dict[str, np.ndarray]


def encoded(value: Any, name: str) -> Held:
    """Raises TypeError for what is not data; `name` is that of its array, or begins the names of those in it."""
    if value is None or type(value) in (bool, int) or (type(value) is str and _WORDS.fullmatch(value)):
        return Held(value, {})
    if type(value) is float:  # JSON has no inf and no NaN
        return Held({"float": value.hex()}, {})
    if isinstance(value, np.generic) and is_known(value.dtype):
        return Held({"scalar": value.dtype.name, "value": encoded(value.item(), name).value}, {})
    if type(value) is np.ndarray and is_known(value.dtype):
        return Held({"array": name}, {name: value})
    if type(value) is list:
        return _sequence(value, name)
    if type(value) is tuple:
        held = _sequence([*value], name)
        return held._replace(value={"tuple": held.value})
    if type(value) is dict:
        value = value.copy()  # at one moment, as threads may change it
        keys = [_encoded_key(key) for key in value]
        held = _sequence([*value.values()], name)
        return held._replace(value={"dict": held.value, "keys": keys})
    raise TypeError


def _encoded_key(key: Any) -> Json:
    held = Held({"key": key}, {}) if type(key) is str and not _ELSEWHERE.match(key) else encoded(key, "")
    if held.arrays:  # which no checkpoint has for a key
        raise TypeError
    return held.value


def _sequence(values: list[Any], name: str) -> Held:
    if len(values) > _FEW_FLOATS and all(type(value) is float for value in values):
        return Held({"floats": name}, {name: np.array(values)})
    if len(values) > _MOST_ITEMS:
        raise TypeError
    held = [encoded(value, f"{name}/{number}") for number, value in enumerate(values)]
    return Held([one.value for one in held], {key: array for one in held for key, array in one.arrays.items()})


def _no_array(name: str) -> np.ndarray:
    raise KeyError(name)


def decoded(value: Any, read: Callable[[str], np.ndarray] = _no_array) -> Any:
    """What `encoded` was given; `read` returns the array of a name."""
    if isinstance(value, list):
        return [decoded(item, read) for item in value]
    if isinstance(value, str) and not _WORDS.fullmatch(value):
        raise ValueError(f"{value!r} could name a file")
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if "scalar" in value:
        return DTYPES[value["scalar"]].type(decoded(value["value"], read))
    if "array" in value:
        return read(value["array"])
    if "floats" in value:
        return read(value["floats"]).tolist()
    if "tuple" in value:
        return tuple(decoded(value["tuple"], read))
    keys = [_key(key) for key in value["keys"]]
    return dict(zip(keys, decoded(value["dict"], read), strict=True))


def _key(value: Any) -> Any:
    """A dict's key: a text that names no file elsewhere, or what `decoded` knows without arrays."""
    if not (isinstance(value, dict) and "key" in value):
        return decoded(value)
    if _ELSEWHERE.match(value["key"]):
        raise ValueError(f"{value['key']!r} could name a file")
    return value["key"]


def fill(present: Any, value: Any) -> bool:
    """Puts what is in a list, dict or array into another one; returns whether that can be."""
    if type(present) is not type(value):
        return False
    if isinstance(present, list):
        present[:] = value
    elif isinstance(present, dict):
        present.clear()
        present.update(value)
    elif isinstance(present, np.ndarray):
        if (present.dtype, present.shape, present.flags.writeable) != (value.dtype, value.shape, True):
            return False
        present[...] = value
    else:
        return False
    return True


def is_like(value: Any, wanted: str) -> bool:
    """Whether a value has this fingerprint."""
    try:
        return fingerprint(encoded(value, "")) == wanted
    except (TypeError, RecursionError):
        return False


def fingerprint(held: Held) -> str:
    """By which a value is known again."""
    arrays = [(name, array_fingerprint(array)) for name, array in held.arrays.items()]
    return hashlib.sha256(json.dumps([held.value, arrays]).encode()).hexdigest()


def array_fingerprint(array: np.ndarray) -> str:
    """By which an array is known again."""
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
