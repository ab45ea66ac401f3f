"""Encodes values of callbacks' attributes as JSON and arrays: plain data only, which cannot name files."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tfdist.checkpoint.format.dtypes import DTYPES, is_known
from tfdist.coordination import Json

_WORDS = re.compile(r"[\w -]*")
_ELSEWHERE = re.compile(r"[/~]|.*(\\|\.\.|:/)", re.DOTALL)  # file names that may be outside of this directory
_MOST_ITEMS = 10_000
_FEW_FLOATS = 100


class Held(NamedTuple):
    """A value as JSON, and the arrays to which it refers, by name."""

    value: Json
    arrays: dict[str, np.ndarray]


def encoded(value: Any, name: str) -> Held:
    """Encodes a value; raises `TypeError` if it is not plain data.

    Args:
      value: the value.
      name: name of its array, or prefix of the names of the arrays in it.
    """
    if value is None or type(value) in (bool, int) or (type(value) is str and _WORDS.fullmatch(value)):
        return Held(value, {})
    if type(value) is float:  # JSON has neither inf nor NaN
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
        value = value.copy()  # a snapshot, as other threads may change it
        keys = [_encoded_key(key) for key in value]
        held = _sequence([*value.values()], name)
        return held._replace(value={"dict": held.value, "keys": keys})
    raise TypeError


def _encoded_key(key: Any) -> Json:
    held = Held({"key": key}, {}) if type(key) is str and not _ELSEWHERE.match(key) else encoded(key, "")
    if held.arrays:  # checkpoints have no arrays in keys
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
    """Decodes the result of `encoded`; `read` returns an array by name."""
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
    """Decodes a dict's key: a text that cannot name a file elsewhere, or a value without arrays."""
    if not (isinstance(value, dict) and "key" in value):
        return decoded(value)
    if _ELSEWHERE.match(value["key"]):
        raise ValueError(f"{value['key']!r} could name a file")
    return value["key"]


def fill(present: Any, value: Any) -> bool:
    """Replaces the contents of a list, dict or array by those of another one; returns whether that is possible."""
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
    """Returns whether a value has this fingerprint."""
    try:
        return fingerprint(encoded(value, "")) == wanted
    except (TypeError, RecursionError):
        return False


def fingerprint(held: Held) -> str:
    """Returns a text that identifies a value."""
    arrays = [(name, array_fingerprint(array)) for name, array in held.arrays.items()]
    return hashlib.sha256(json.dumps([held.value, arrays]).encode()).hexdigest()


def array_fingerprint(array: np.ndarray) -> str:
    """Returns a text that identifies an array."""
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
