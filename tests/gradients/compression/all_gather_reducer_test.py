"""Every codec as a reducer: equal totals, nothing lost, the stated bytes, and inf and NaN detected by all ranks."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.collectives import threads
from tests.gradients.compression.reducers import SHAPES, code_bytes, codec_of, edge_gradients, named
from tests.gradients.replicas import bits, check_conservation, check_sums, on_threads
from tfdist.collectives import OneReplica
from tfdist.gradients.compression import Codec, CodecReducer
from tfdist.gradients.compression.reducers import CodecCompiler

METHODS = [
    "fp16",
    "bf16",
    "int8(block=64)",
    "int8(bits=4,stochastic=True)",
    "onebit",
    "terngrad(clip=2.5)",
    "qsgd",
    "signsgd",
]
REPLICAS = 3


@pytest.mark.parametrize(
    ("text", "dtypes", "scatters"),
    [
        *((text, tf.uint8, False) for text in METHODS),
        *((text, tf.int32, False) for text in ("bf16", "onebit")),
        *((text, tf.uint8, True) for text in ("bf16", "int8(block=64)", "int8(stochastic=True)")),
    ],
)
def test_totals_are_equal_on_all_and_with_feedback_nothing_is_lost(text, dtypes, scatters):
    gradients, sizes = edge_gradients(2, REPLICAS), [int(np.prod(shape)) for shape in SHAPES if np.prod(shape)]
    reducer = named(f"{text[:-1]},feedback=True)" if "(" in text else f"{text}(feedback=True)")
    stated = sum(-(-(code_bytes(reducer.inner._codec, size) + 4) // 4) * 4 for size in sizes)
    steps, recordings = on_threads(reducer, gradients, packed=dtypes, native_all_to_all=scatters)
    if not scatters:
        assert [recording.payload_bytes for recording in recordings] == [stated * len(steps)] * REPLICAS
    for tensors, step in zip(gradients, steps, strict=True):
        check_sums(tensors, step)
        assert all(np.isfinite(witness).all() for witness in step.witnesses[0])
        assert len(step.witnesses[0]) == len(sizes)
    check_conservation(gradients, steps)


@pytest.mark.parametrize("text", METHODS)
def test_a_bad_element_anywhere_is_seen_by_all(text):
    [values] = edge_gradients(1, REPLICAS)
    values[2][0].flat[0], values[3][1].flat[77], values[4][2].flat[-1] = np.nan, np.inf, -np.inf
    [step], _ = on_threads(named(text), [values])
    for mine in step.witnesses:
        assert bits(mine) == bits(step.witnesses[0])
        good, (nan, inf, minus), zeros = mine[0], mine[1:4], mine[4]
        assert np.isfinite(good).all()
        assert np.isfinite(zeros).all()
        assert [list(np.isfinite(w)) for w in (nan, inf, minus)] == [
            [False, True, True],
            [True, False, True],
            [True, True, False],
        ]


@pytest.mark.parametrize("text", METHODS)
def test_xla_sees_it_too_and_decodes_the_same(text):
    size, codec, dtypes, seed = 16 * 1024 + 13, codec_of(text), OneReplica.dtypes, tf.constant([3, 4])
    assert codec.compiles
    coder, random = CodecCompiler(codec), np.random.default_rng(0)
    x = random.standard_normal(size).astype("float32")
    decoded, check = coder.sum(coder.encode(tf.constant(x), seed, dtypes), 1, size, dtypes)
    assert np.isfinite(check).all()
    plain = codec.decode(codec.encode(tf.constant(x), seed), size)
    different = ~np.isclose(decoded, plain, rtol=1e-5, atol=1e-6)
    assert different.mean() < 1e-3, "but for ties, which another order of operations decides otherwise"
    for place in (0, 777, size - 14, size - 1):
        for bad in (np.nan, -np.nan, np.inf, -np.inf):
            y = x.copy()
            y[place] = bad
            _, check = coder.sum(coder.encode(tf.constant(y), seed, dtypes), 1, size, dtypes)
            assert not np.isfinite(check).any(), (place, bad)


@pytest.mark.parametrize(
    ("text", "size", "stated"),
    [
        ("int8", 8_388_608, 8_388_608 + 4 * 32768),
        ("int8(bits=4, block=64)", 640, 320 + 4 * 10),
        ("int8(bits=3)", 256 + 1, 3 * 32 + 4 + 3 + 4),
        ("onebit", 8_388_608, 8_388_608 // 8 + 4 * 32768),
        ("onebit(block=64)", 65, 8 + 4 + 1 + 4),
        ("signsgd", 8003, 1001),
        ("terngrad", 8_388_608, 8_388_608 // 4 + 4),
        ("terngrad(clip=1.0)", 1, 2 + 4),
        *(
            (f"qsgd(levels={levels})", 1280, 160 * bits + 4 * 10)
            for levels, bits in ((1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (15, 5), (63, 7), (64, 8), (127, 8))
        ),
    ],
)
def test_the_bytes_of_a_code(text, size, stated):
    assert code_bytes(codec_of(text), size) == stated


def test_xla_sums_what_all_replicas_sent():
    size, dtypes, seed = 16 * 1024 + 13, OneReplica.dtypes, tf.constant([3, 4])
    for text in ("bf16", "qsgd"):
        coder = CodecCompiler(codec_of(text))
        vectors = np.random.default_rng(0).standard_normal((3, size)).astype("float32")
        packed = [coder.encode(tf.constant(x), seed, dtypes) for x in vectors]
        total, checks = coder.sum(tf.concat(packed, axis=0), 3, size, dtypes)
        assert checks.shape == [3]
        np.testing.assert_allclose(total, sum(coder.sum(p, 1, size, dtypes)[0] for p in packed), rtol=1e-5, atol=1e-5)


class Halves(Codec):
    biased = True
    randomized = True

    def encode(self, x, seed):
        return [x / 2, seed]

    def decode(self, code, size):
        return code[0]


def test_draws_are_counted_and_make_other_seeds():
    reducer = CodecReducer(Halves())
    specs = [tf.TensorSpec([3], name="a"), tf.TensorSpec([0], name="b")]
    assert [(s.name, s.shape, s.dtype, s.per_replica) for s in reducer.state(specs)] == [
        ("a/draws", (), tf.int32, False),
        ("b/draws", (), tf.int32, False),
    ]
    seeds = []

    class Seeing(Halves):
        def decode(self, code, size):
            seeds.append(tuple(code[1].numpy()))
            return code[0]

    def step(collectives, draws):
        for name in ("g", "h"):
            reduced = CodecReducer(Seeing()).reduce([tf.ones([3]), tf.ones([0])], draws, collectives, name=name)
        return reduced

    draws = [tf.constant(0), tf.constant(0)]
    for number in (1, 2):
        [first, second] = threads.run(2, functools.partial(step, draws=draws))
        assert [int(d) for d in first.state] == [int(d) for d in second.state] == [number, 0]
        np.testing.assert_array_equal(first.totals[0], [1, 1, 1])
        draws = first.state
    assert len(set(seeds)) == 2 * 2 * 2, "one for each step, name and replica"
