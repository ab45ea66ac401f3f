"""Callback state as JSON: plain data is preserved bit for bit, anything else is rejected."""

import json
import types

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.checkpoint.callback_state import decode_value, encode_value

VALUES = {
    "none": None,
    "flag": True,
    "count": -(10**30),
    "text": "/etc/passwd",  # just a string, which the callback must validate
    "exact": 0.1 + 0.2,
    "zero": -0.0,
    "infinite": [float("inf"), float("-inf"), float("nan")],
    "pair": (1, (2.5, None)),
    "table": {3: "three", "four": [4], (5, 6.5): {}, float("inf"): 1},
    "float": {"float": "0x1p3"},  # a dict that looks like an encoded value
    "single": np.float32(0.1),
    "narrow": ml_dtypes.bfloat16(0.1),
    "truth": np.bool_(True),
    "array": np.arange(6, dtype="float64").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6, dtype="float32").reshape(2, 3)),
    "weights": [np.ones(2, "float32"), np.zeros((0, 4), "uint8")],
    "mixed": {"best": np.full(3, 0.5), "best/0": [np.ones(1)], "at": 4},
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
        assert repr(one) == repr(other)


@pytest.mark.parametrize("name", VALUES)
def test_every_bit_comes_back(name):
    arrays = {}
    text = json.dumps(encode_value(VALUES[name], "of it", arrays), allow_nan=False)
    same(decode_value(json.loads(text), arrays.pop), VALUES[name])
    assert not arrays


@pytest.mark.parametrize("of", [tf.constant, keras.Variable, lambda value: np.array(value, "float32")])
def test_tensors_come_back_as_numpy(of):
    arrays = {}
    values = encode_value([of([1.5, 2.5]), of(0.5)], "of it", arrays)
    vector, scalar = decode_value(values, arrays.pop)
    same(vector, np.array([1.5, 2.5], "float32"))
    same(scalar, np.float32(0.5))


@pytest.mark.parametrize(
    "value", [print, {1, 2}, [1, object()], types.SimpleNamespace(a=1), np.array(["text"]), np.array([None]), 1j, b"x"]
)
def test_what_is_more_than_data_is_refused(value):
    with pytest.raises(TypeError):
        encode_value(value, "of it", {})
