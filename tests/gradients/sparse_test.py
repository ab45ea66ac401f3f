"""Sparse gradients: the same sums as dense ones, bitwise equal on all replicas, sent in the way that costs fewer bytes."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.gradients import Bucketed, ErrorFeedback, LossScale, Sum
from tfdist.gradients.reducer import SparseRows

ROWS, WIDTH = 40, (3, 2)


def slices(indices, values, rows=ROWS):
    values = tf.convert_to_tensor(values)
    return tf.IndexedSlices(values, tf.convert_to_tensor(indices), tf.constant([rows, *values.shape[1:]]))


def to_dense(indices, values, rows=ROWS):
    whole = np.zeros((rows, *values.shape[1:]), "float64")
    np.add.at(whole, indices, values)
    return whole


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, ROWS - 1), max_size=60), st.sampled_from(["float16", "float32", "float64"]))
def test_one_replica(indices, dtype):
    """Repeated indices, no indices, and more indices than rows."""
    random = np.random.default_rng(len(indices))
    values = random.standard_normal((len(indices), *WIDTH)).astype(dtype)
    indices = np.array(indices, "int64")
    [total], [sent], state, [witness] = SparseRows(Sum()).reduce([slices(indices, values)], [], OneReplica(), name="g")
    assert (total.shape, total.dtype, state) == ((ROWS, *WIDTH), dtype, [])
    np.testing.assert_allclose(total, to_dense(indices, values), rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-2)
    np.testing.assert_array_equal(sent, total)
    assert np.isfinite(witness).all()


def reduce_on(strategy, reducer, indices, values, rows, state=()):
    """Returns totals, sent, state and witnesses by replica, and the calls of one replica; values: [replicas, n, ...]."""
    recording = RecordingCollectives(strategy.collectives)
    dense = np.ones((3,), "float32")

    @tf.function(autograph=False)
    def step():
        def replica_function():
            rank = strategy.collectives.rank
            mine = slices(tf.gather(indices, rank), tf.gather(values, rank), rows)
            return reducer.reduce([mine, tf.constant(dense)], list(state), recording, name="g")

        return tf.nest.map_structure(lambda x: tuple(strategy.local(x)), strategy.run(replica_function))

    parts = tf.nest.map_structure(lambda x: x.numpy(), step())
    return parts, operations(recording)


def operations(recording):
    """Returns the calls of one replica; all replicas, which are traced in turn, make calls with the same names."""
    return [call.operation for call in {call.name: call for call in recording.calls}.values()]


@pytest.mark.parametrize(("rows", "way"), [(ROWS, "all_gather"), (6, "all_reduce")], ids=["rows", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_replicas(mirrored4, rows, way, dtype):
    """Rows are gathered where that sends less: r (b + 4) + 4 bytes to 3 others, compared with 2 V b 3 / 4."""
    random = np.random.default_rng(0)
    indices = random.integers(0, rows, (4, 9)).astype("int32")
    indices[1] = 5  # a single row on this replica
    values = random.standard_normal((4, 9, *WIDTH)).astype(dtype)
    (totals, sent, _, witnesses), calls = reduce_on(mirrored4, SparseRows(Sum()), indices, values, rows)
    assert calls == [way, "all_reduce"]
    exact = [to_dense(i, v, rows) for i, v in zip(indices, values, strict=True)]
    for replica in range(4):
        assert totals[0][replica].tobytes() == totals[0][0].tobytes()
        np.testing.assert_allclose(sent[0][replica], exact[replica], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(totals[0][0], sum(exact), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(totals[1][0], [4, 4, 4])
    assert all(np.isfinite(w[0]).all() for w in witnesses)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [ROWS, 6], ids=["rows", "dense"])
def test_a_row_that_is_not_finite_is_seen_by_all(mirrored4, bad, rows):
    indices = np.tile(np.arange(4, dtype="int32"), (4, 1))
    values = np.ones((4, 4, 2), "float32")
    values[2, 3, 1] = bad
    (*_, witnesses), _ = reduce_on(mirrored4, SparseRows(Sum()), indices, values, rows)
    for replica in range(4):
        assert not all(np.isfinite(w[replica]).all() for w in witnesses)
        assert all(w[replica].tobytes() == w[0].tobytes() for w in witnesses)


def test_payload():
    """With a known number of rows (eagerly): each index is sent once, and their count."""
    recording = RecordingCollectives(OneReplica())
    indices = np.array([7, 7, 7, 2], "int64")
    SparseRows(Sum()).reduce([slices(indices, np.ones((4, *WIDTH), "float32"))], [], recording, name="g")
    assert recording.payload_bytes == 2 * (6 * 4 + 4) + 4


@pytest.mark.parametrize("rows", [None, 9], ids=["unknown", "too many"])
def test_dense_where_rows_would_send_more(rows):
    recording = RecordingCollectives(OneReplica())

    @tf.function(input_signature=[tf.TensorSpec([rows], tf.int32), tf.TensorSpec([rows, 1], tf.float32)])
    def step(indices, values):
        return SparseRows(Sum()).reduce([slices(indices, values, rows=3)], [], recording, name="g").totals[0]

    total = step(tf.constant([1] * 9), tf.ones([9, 1]))
    assert [call.operation for call in recording.calls] == ["all_reduce"]
    np.testing.assert_array_equal(total, [[0], [9], [0]])


class Half(Sum):
    biased = True

    def reduce(self, tensors, state, collectives, *, name):
        half = [tensor / 2 for tensor in tensors]
        return super().reduce(half, state, collectives, name=name)


def test_state_belongs_to_a_tensor_and_waits_while_that_goes_as_rows():
    """One tensor is sent as rows and the other dense, and vice versa; nothing is lost of either."""
    reducer = SparseRows(ErrorFeedback(Bucketed(Half())))
    specs = [tf.TensorSpec([ROWS, 2], tf.float32, name) for name in ("first", "second")]
    assert [state.name for state in reducer.state(specs)] == ["first/error", "second/error"]
    assert SparseRows(Half()).biased and not reducer.biased
    values = np.random.default_rng(1).standard_normal((4, 2)).astype("float32")
    few, dense = slices(np.arange(4), values), tf.constant(to_dense(np.arange(4), values), tf.float32)
    state = [tf.zeros([ROWS, 2])] * 2
    sent = [0.0, 0.0]
    for tensors in ([few, dense], [dense, few], [dense, dense]):
        before = state
        totals, parts, state, _ = reducer.reduce(tensors, state, OneReplica(), name="g")
        sent = [whole + part for whole, part in zip(sent, parts, strict=True)]
        for i, tensor in enumerate(tensors):
            if tensor is few:
                np.testing.assert_array_equal(totals[i], dense)
                assert state[i] is before[i]
    for whole, kept in zip(sent, state, strict=True):
        np.testing.assert_allclose(whole + kept, 3 * dense, rtol=1e-6)


def trained_embedding(strategy, rows, **options):
    """Trains a model whose embedding has `rows` rows for a few steps; returns the weights and the last record."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Embedding(rows, 8), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        trainer = tfdist.Trainer(
            model,
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **options,
        )
    random = np.random.default_rng(1)
    data = (random.integers(0, rows, (32, 6)).astype("int32"), random.integers(0, 3, 32))
    history = trainer.fit(data, batch_size=8, steps=5)
    return [np.array(v) for v in model.variables], history.last("train"), trainer


def test_a_model_with_a_large_embedding_sends_rows(single, mirrored2, float64, caplog):
    """The same weights as on one device, with fewer bytes than the embedding's size; logged once, with the variable's name."""
    expected, *_ = trained_embedding(single, 8000)
    with caplog.at_level(logging.INFO, "tfdist"):
        found, record, _ = trained_embedding(mirrored2, 8000)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    assert caplog.text.count("The gradient of sequential/embedding/embeddings is sent as rows") == 1
    assert record["compression_ratio"] > 10


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"loss_scale": LossScale(initial=4.0)}], ids=str)
def test_rows_beside_other_options(single, mirrored2, float64, options):
    expected, *_ = trained_embedding(single, 8000)
    found, *_ = trained_embedding(mirrored2, 8000, **options)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
