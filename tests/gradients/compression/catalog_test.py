"""The reducers that `--compression` creates: the method of each tensor, combinations, and one-line errors."""

import inspect
import logging
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.compression.reducers import ARGUMENTS, method, named
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, ErrorFeedback, Sum
from tfdist.gradients.compression import (
    COMPRESSION_MIN_BYTES,
    METHODS,
    check,
    choose_methods,
    create_reducer,
    parse_choice,
)
from tfdist.gradients.compression.reducers import CodecReducer

TEXT = "path=.*embedding.*: none; size>=1000: topk(ratio=0.05)|fp16; *: int8"
SPECS = [
    tf.TensorSpec([50, 40], tf.float32, "model/embedding/table"),
    tf.TensorSpec([40, 30], tf.float32, "model/dense/kernel"),
    tf.TensorSpec([30, 30], tf.float32, "model/out/kernel"),
    tf.TensorSpec([30], tf.float32, "model/out/bias"),
    tf.TensorSpec([], tf.float32, "loss"),
]


def test_the_first_rule_that_holds_and_else_the_exact_sum():
    assert choose_methods(SPECS, TEXT, {}, min_bytes=0) == ["none", "topk(ratio=0.05)|fp16", "int8", "int8", "none"]
    assert choose_methods(SPECS, "size>=1000: int8", {}, min_bytes=0) == ["int8", "int8", "none", "none", "none"]


def test_small_tensors_and_scalars_are_exact():
    assert choose_methods(SPECS, "int8", {}, min_bytes=4 * 900) == ["int8", "int8", "int8", "none", "none"]
    assert choose_methods(SPECS, "int8", {}, min_bytes=4 * 901) == ["int8", "int8", "none", "none", "none"]
    assert set(choose_methods(SPECS, "int8", {}, COMPRESSION_MIN_BYTES)) == {"none"}


def test_overrides_go_before_the_rules():
    overrides = {"model/dense/kernel": "bf16", "loss": "bf16", "model/out/bias": "none"}
    assert choose_methods(SPECS, TEXT, overrides, min_bytes=0) == ["none", "bf16", "int8", "none", "none"]


def test_each_tensor_is_sent_as_its_rule_says():
    reducer, recording = create_reducer(SPECS, TEXT, min_bytes=200), RecordingCollectives(OneReplica())
    values = [tf.constant(np.random.default_rng(0).standard_normal(s.shape).astype("float32")) for s in SPECS]
    state = [tf.zeros(s.shape, s.dtype) for s in reducer.state(SPECS)]
    reduced = reducer.reduce(values, state, recording, name="g")
    # topk sends 60 values, each an index and an fp16; int8 has one scale per 256 values; both have a check.
    assert sorted((call.operation, call.payload_bytes) for call in recording.calls) == [
        ("all_gather", 60 * (4 + 2) + 4),
        ("all_gather", 900 + 4 * 4 + 4),
        ("all_reduce", 4 * (2000 + 30 + 1)),
    ]
    for i in (0, 3, 4):
        np.testing.assert_array_equal(reduced.totals[i], values[i])
    assert np.count_nonzero(reduced.totals[1]) == 60


def test_errors_belong_to_variables_whatever_the_buckets_are():
    reducer = create_reducer(SPECS, "int8", min_bytes=0, small_bytes=10**6, bucket_bytes=10**6)
    errors = [state for state in reducer.state(SPECS) if state.name.endswith("/error")]
    assert [(state.name, state.shape) for state in errors] == [
        (f"{spec.name}/error", tuple(spec.shape)) for spec in SPECS[:-1]
    ]


@pytest.mark.parametrize(
    ("text", "feedback"),
    [
        ("int8", True),
        ("int8(feedback=False)", False),
        ("int8(stochastic=True)", False),
        ("int8(stochastic=True, feedback=True)", True),
        ("topk(ratio=0.1)|fp16", True),
        ("topk(ratio=0.1, feedback=False)|fp16", False),
        ("topk(ratio=0.1)|fp16(feedback=False)", False),
        ("onebit", True),
        ("qsgd", False),
        ("terngrad", False),
        ("terngrad(clip=2.5)", True),
        ("dgc(ratio=0.1)", False),
        ("randomk(ratio=0.3)", True),
        ("randomk(ratio=0.3, unbiased=True)", False),
        ("signsgd", False),
        ("bf16", False),
        ("none", False),
    ],
)
def test_feedback_is_on_where_a_method_is_biased_and_can_be_chosen(text, feedback):
    assert isinstance(named(text), ErrorFeedback) == feedback
    ways = create_reducer(SPECS, text, min_bytes=0).state(SPECS)
    assert any(state.name.endswith("/error") for state in ways) == feedback


OWN = """
import tensorflow as tf
from tfdist.gradients import Sum
from tfdist.gradients.compression import Codec

class Tenth(Codec):
    biased = False

    def __init__(self, *, offset=0.0):
        self._offset = offset

    def encode(self, x, seed):
        return [x[::10]]

    def decode(self, code, size):
        return tf.repeat(code[0], 10)[:size] + self._offset

class Exact(Sum):
    pass
"""


def test_a_users_own(tmp_path, monkeypatch):
    (tmp_path / "own_compression.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    recording = RecordingCollectives(OneReplica())
    reducer = named("own_compression:Tenth(offset=0.5)")
    [total] = reducer.reduce([tf.range(20.0)], [], recording, name="g").totals
    np.testing.assert_array_equal(total, [0.5] * 10 + [10.5] * 10)
    assert recording.payload_bytes == 8 + 4
    assert isinstance(named("own_compression:Tenth(feedback=True)"), ErrorFeedback)
    assert isinstance(named("own_compression:Exact"), Sum)
    coded = named("topk(ratio=0.5)|own_compression:Tenth").inner
    assert isinstance(coded, CodecReducer)
    with pytest.raises(InputError, match='has no parameter "factor"'):
        named("own_compression:Tenth(factor=2)")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_made_by_name_and_says_what_it_does(name):
    reducer = named(ARGUMENTS.get(name, name))
    assert isinstance(Bucketed(getattr(reducer, "inner", reducer)), Bucketed)
    parameters = inspect.signature(method(name)).parameters.values()
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    text = inspect.getdoc(method(name))
    assert re.search(r"\bCost: ", text), "the cost in bytes"
    assert re.search(r"\b(19|20)\d\d\b", text), "a reference"


def test_an_experimental_method_is_said_to_be_one_once(caplog, monkeypatch):
    monkeypatch.setattr(method("qsgd"), "experimental", True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            named("qsgd(block=72)")
            named("bf16")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "Compression by qsgd(block=72) is experimental"
    ]


def test_auto():
    assert parse_choice("bf16") is None
    assert parse_choice("auto").candidates[0] == "none"
    choice = parse_choice("auto(after=3, allow='fp16; topk(ratio=0.1)|bf16')")
    assert (choice.after, choice.candidates) == (3, ("none", "fp16", "topk(ratio=0.1)|bf16"))
    check("auto(allow='int8')")
    for text, message in (
        ("auto(after=0)", "after at least 1 step"),
        ("auto(allow='inti8')", "inti8 is not known"),
        ("auto(candidates=1)", 'auto has no parameter "candidates"'),
    ):
        with pytest.raises(InputError, match=message):
            check(text)
