"""Compression methods by name, and calls of codecs and reducers on one replica and on threads."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.collectives import threads
from tfdist.collectives import Collectives, OneReplica, Recording
from tfdist.gradients import Reduced, Reducer
from tfdist.gradients.compression import METHODS, Codec, create
from tfdist.grammar.rules import parse_rules

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
ROUNDING = [2e-2 if dtype == "float16" else 1e-5 for dtype in DTYPES]


def edge_gradients(random: np.random.Generator, step: int, *replicas: int) -> list[np.ndarray]:
    """Returns arrays of all shapes and dtypes, each for all replicas; the last has only zeros or denormals."""
    values = [random.standard_normal((*replicas, *s)).astype(d) for s, d in zip(SHAPES, DTYPES, strict=True)]
    return [*values[:-1], values[-1] * np.float32(1e-39 * (step % 2))]


def assert_near(found: Any, wanted: Any, i: int) -> None:
    """Compares up to the rounding of the i-th array of `edge_gradients`."""
    np.testing.assert_allclose(found, wanted, rtol=ROUNDING[i], atol=ROUNDING[i])


def method(name: str) -> Any:
    """Returns the class of a method."""
    module, attribute = METHODS[name].split(":")
    return getattr(importlib.import_module(f"tfdist.gradients.compression.methods.{module}"), attribute)


def named(text: str) -> Reducer:
    """Returns the reducer of one method, with error feedback if it has any, without buckets."""
    [rule] = parse_rules(text)
    return create(rule.methods)


def codec_of(text: str) -> Codec:
    """Returns the codec of one method."""
    reducer = named(text)
    return getattr(reducer, "inner", reducer)._codec


def coded(codec: Codec, x: np.ndarray, seed: tf.Tensor = SEED) -> np.ndarray:
    """Returns decode(encode(x)) as float64; the code has the stated size."""
    code = codec.encode(tf.constant(x), seed)
    assert sum(part.shape.num_elements() * part.dtype.size for part in code) == codec.payload_bytes(x.size)
    return codec.decode(code, x.size).numpy().astype("float64")


def initial(reducer: Reducer, tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the state before the first step."""
    specs = [tf.TensorSpec(x.shape, x.dtype, f"variable{i}") for i, x in enumerate(tensors)]
    return [tf.broadcast_to(tf.cast(s.initial, s.dtype), s.shape) for s in reducer.state(specs)]


def reduced(reducer: Reducer, x: Any, *state: int, collectives: Collectives | None = None) -> Reduced:
    """Reduces one tensor; state: such as the number of draws."""
    return reducer.reduce([tf.constant(x)], [*map(tf.constant, state)], collectives or OneReplica(), name="g")


def on_threads(
    reducer: Reducer, steps: Sequence[Sequence[Sequence[np.ndarray]]], **how: Any
) -> list[tuple[list[Reduced], Recording]]:
    """Returns for each rank the results of `reduce` for all steps, and its calls.

    Args:
      reducer: the reducer.
      steps: the tensors of each step and rank.
      how: see `threads.run`.
    """

    def rank(collectives: Collectives) -> tuple[list[Reduced], Recording]:
        recording, state, made = Recording(collectives), initial(reducer, steps[0][0]), []
        for number, step in enumerate(steps):
            mine = [tf.constant(value) for value in step[collectives.rank]]
            made.append(reducer.reduce(mine, state, recording, name=f"step{number}"))
            state = made[-1].state
        return made, recording

    return threads.run(len(steps[0]), rank, **how)
