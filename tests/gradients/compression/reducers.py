"""Compression methods by name, gradients of all kinds, and calls of codecs and reducers on one replica."""

import importlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica
from tfdist.collectives.interface import tensor_bytes
from tfdist.config.rules import parse_rules
from tfdist.gradients import Reducer, ReductionResult
from tfdist.gradients.compression import METHODS, Codec, create
from tfdist.gradients.compression.reducers import CodecCompiler

ARGUMENTS = {  # of methods that need some
    "topk": "topk(ratio=0.1)",
    "threshold": "threshold(value=0.01)",
    "randomk": "randomk(ratio=0.1)",
    "projection": "projection(ratio=0.25)",
    "sketch": "sketch(rows=3, columns=100)",
    "dgc": "dgc(ratio=0.1)",
    "powersgd": "powersgd(rank=2)",
}
SEED = tf.constant([5, 6])
# A scalar, an empty array, arrays of up to four dims, and of three dtypes.
SHAPES = [(), (0, 3), (40, 50), (2, 3, 4, 5), (9, 11), (31,)]
DTYPES = ["float32", "float32", "float32", "float64", "float16", "float32"]


def edge_gradients(steps: int, replicas: int) -> list[list[np.ndarray]]:
    """Returns arrays of all shapes and dtypes for each step; the last has only zeros or denormals."""
    random = np.random.default_rng(0)
    made = []
    for step in range(steps):
        values = [random.standard_normal((replicas, *s)).astype(d) for s, d in zip(SHAPES, DTYPES, strict=True)]
        made.append([*values[:-1], values[-1] * np.float32(1e-39 * (step % 2))])
    return made


def method(name: str) -> Any:
    module, attribute = METHODS[name].split(":")
    return getattr(importlib.import_module(f"tfdist.gradients.compression.methods.{module}"), attribute)


def named(text: str) -> Reducer:
    """Returns the reducer of one method, with error feedback if it has any, without buckets."""
    [rule] = parse_rules(text)
    return create(rule.methods)


def codec_of(text: str) -> Codec:
    reducer = named(text)
    return getattr(reducer, "inner", reducer)._codec


def coded(codec: Codec, x: np.ndarray, seed: tf.Tensor = SEED) -> np.ndarray:
    """Returns decode(encode(x)) as float64."""
    return codec.decode(codec.encode(tf.constant(x), seed), x.size).numpy().astype("float64")


def code_bytes(codec: Codec, size: int) -> int:
    """Returns the bytes of the code of a vector of this length."""
    *parts, _ = CodecCompiler(codec).packing(size, OneReplica.dtypes).specs
    return sum(map(tensor_bytes, parts))


def reduced(reducer: Reducer, x: Any, *state: int, collectives: Collectives | None = None) -> ReductionResult:
    """Reduces one tensor; state: such as the number of draws."""
    return reducer.reduce([tf.constant(x)], [*map(tf.constant, state)], collectives or OneReplica(), name="g")
