"""Values of callbacks' attributes through JSON, and what a stranger's may not be."""

import json
import types

import ml_dtypes
import numpy as np
import pytest

from tfdist.checkpoint.callback_values import decoded, encoded

VALUES = {
    "none": None,
    "flag": True,
    "count": -(10**30),
    "text": "warm-up",
    "exact": 0.1 + 0.2,
    "infinite": [float("inf"), float("-inf")],
    "pair": (1, (2.5, None)),
    "table": {3: "three", "four": [4], (5, 6): {}},
    "single": np.float32(0.1),
    "narrow": ml_dtypes.bfloat16(0.1),
    "truth": np.bool_(True),
    "array": np.arange(6, dtype="float64").reshape(2, 3),
    "zero_axes": np.array(7, "int16"),
    "fortran": np.asfortranarray(np.arange(6, dtype="float32").reshape(2, 3)),
    "weights": [np.ones(2, "float32"), np.zeros((0, 4), "uint8")],
    "mixed": {"best": np.full(3, 0.5), "at": 4},
    "losses": {"val/loss": [1.5, float("nan")], "train/loss": [1 / n for n in range(1, 2000)]},
    "limit": 9,
    "_private": 1,
}


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, dict):
        same([*one], [*other])
        same([*one.values()], [*other.values()])
    else:
        assert one == other or (one != one and other != other)


@pytest.mark.parametrize("name", VALUES)
def test_every_bit_comes_back(name):
    held = encoded(VALUES[name], "of it")
    arrays = dict(held.arrays)
    same(decoded(json.loads(json.dumps(held.value)), arrays.pop), VALUES[name])
    assert not arrays


@pytest.mark.parametrize(
    "value",
    [
        print,
        "/etc/passwd",
        "C:\\autoexec.bat",
        "best.weights.h5",
        "..",
        ["words of a list", "logs.csv"],
        ["word"] * 10_001,
        {"/etc/passwd": 1.0},
        {"~/.profile": 1.0},
        {"out/../../one.keras": 1.0},
        {tuple(n / 7 for n in range(101)): 1},
        {1, 2},
        [1, object()],
        types.SimpleNamespace(a=1),
        np.array(["text"]),
        np.array([None]),
        np.datetime64("2020-01-01"),
        1j,
    ],
)
def test_what_is_more_than_data_is_refused(value):
    with pytest.raises(TypeError):
        encoded(value, "of it")


@pytest.mark.parametrize(
    "value",
    [
        {"scalar": "object", "value": 1},
        {"scalar": "int8", "value": 300},
        {"float": "0x1p99999"},
        "..",
        {"float": 3},
        {"else": 3},
        {"dict": [1], "keys": []},
        {"dict": [1], "keys": [{"key": "/etc/passwd"}]},
        {"dict": [1], "keys": [{"key": "..\\x"}]},
        {"dict": [1], "keys": [{"key": 5}]},
    ],
)
def test_what_is_not_understood_is_refused(value):
    with pytest.raises((ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
        decoded(value)
