"""All-to-all with splits: any number of rows from each replica to each, compared with NumPy; also on real ranks."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

from tests.workers import running
from tests.workers.exchange import SUMMED
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.errors import InputError

pytestmark = pytest.mark.processes

RANKS = 3
CASES = ("uneven", "ring", "one_sender", "nothing")
ROWS = {"float32": (3,), "float64": (), "int32": (2, 2), "int64": (1,)}  # by dtype: the dims after the first


def splits_of(case, replicas):
    """Returns the number of rows by sender and receiver, [N, N]."""
    table = {
        "uneven": np.array([[1, 2, 0, 3], [4, 0, 1, 0], [0, 1, 2, 1], [2, 0, 0, 5]])[:replicas, :replicas],
        "ring": 3 * np.roll(np.eye(replicas), 1, axis=1),  # everything to the next one
        "one_sender": np.outer(np.arange(replicas) == replicas - 1, np.arange(replicas) + 1),
        "nothing": np.zeros([replicas, replicas]),
    }[case]
    return table.astype("int32")


def arrays_of(table):
    """Returns an array of each dtype for each sender; each element identifies its sender and row."""
    return [
        [
            (np.arange(rows * np.prod(row, dtype=int)).reshape(rows, *row) + 1000 * sender).astype(dtype)
            for dtype, row in ROWS.items()
        ]
        for sender, rows in enumerate(table.sum(1))
    ]


def expected(table, arrays, receiver):
    """Returns what one replica receives: an array of each dtype."""
    parts = [
        [np.split(x, np.cumsum(rows)[:-1])[receiver] for x in sent] for sent, rows in zip(arrays, table, strict=True)
    ]
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def assert_same(received, wanted):
    for a, b in zip(received, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)


def mine(collectives, table, arrays):
    """Returns a replica's own tensors, whose first dim is unknown while tracing, and its splits."""
    splits = tf.gather(tf.constant(table), collectives.rank)
    longest = table.sum(1).max()
    padded = [np.stack([np.resize(x, (longest, *x.shape[1:])) for x in each]) for each in zip(*arrays, strict=True)]
    return [tf.gather(tf.constant(x), collectives.rank)[: tf.reduce_sum(splits)] for x in padded], splits


@pytest.mark.parametrize("case", CASES)
def test_every_row_goes_where_it_is_sent(strategy, run, case):
    table = splits_of(case, strategy.replicas)
    arrays = arrays_of(table)

    def exchange(collectives):
        tensors, splits = mine(collectives, table, arrays)
        return collectives.all_to_all(tensors, name="exchange", splits=splits)

    for rank, received in enumerate(run(strategy, exchange)):
        assert_same(received, expected(table, arrays, rank))


@pytest.mark.parametrize("unknown", [None, 6])
def test_only_the_first_dim_is_not_known_when_tracing(mirrored2, unknown):
    shapes = []

    def exchange(x):
        [received] = mirrored2.collectives.all_to_all([x], name="exchange", splits=tf.constant([2, 4]))
        shapes.append(received.shape.as_list())
        return received

    traced = tf.function(lambda x: mirrored2.run(exchange, x), autograph=False)
    traced.get_concrete_function(tf.TensorSpec([unknown, 5], tf.float32))
    assert shapes == [[None, 5]] * 2


@pytest.mark.parametrize("splits", [[1, 2], [3, 2], [-1, 5], [5, -1]])
def test_splits_that_do_not_fit(mirrored2, splits):
    def exchange():
        tensors = [tf.zeros([4, 2]), tf.zeros([4])]
        return mirrored2.collectives.all_to_all(tensors, name="exchange", splits=tf.constant(splits))

    compiled = tf.function(lambda: mirrored2.run(exchange), autograph=False)
    for call in (lambda: mirrored2.run(exchange), compiled):
        with pytest.raises(tf.errors.InvalidArgumentError, match="all_to_all exchange: splits must be at least 0, and"):
            call()


def test_one_of_several_tensors_has_other_rows():
    tensors = [tf.zeros([4]), tf.zeros([5])]
    with pytest.raises(tf.errors.InvalidArgumentError, match="sum must be the number of rows of every tensor"):
        OneReplica().all_to_all(tensors, name="exchange", splits=tf.constant([4]))


@pytest.mark.parametrize("splits", [tf.constant([2, 2]), tf.constant(4), tf.constant([4], tf.int64)])
def test_splits_of_another_shape_or_dtype(splits):
    traced = tf.function(lambda x: OneReplica().all_to_all([x], name="exchange", splits=splits), autograph=False)
    with pytest.raises(InputError, match="one for each of 1 replicas. Received: int(32|64) of shape"):
        traced(tf.zeros([4]))


def test_recording_passes_splits_on(mirrored2):
    recording = RecordingCollectives(mirrored2.collectives)

    def exchange():
        return recording.all_to_all([tf.fill([2], recording.rank)], name="exchange", splits=tf.constant([0, 2]))[0]

    assert [x.numpy().tolist() for x in mirrored2.local(mirrored2.run(exchange))] == [[], [0, 0, 1, 1]]
    assert [(call.operation, call.payload_bytes) for call in recording.calls] == [("all_to_all", 8)] * 2


@pytest.mark.parametrize("name", ["multiworker", "horovod"])
def test_real_ranks(name, tmp_path):
    """Eagerly, and in a step that runs twice, in which TensorFlow must not fold a message into a constant."""
    if name == "horovod":
        pytest.importorskip("horovod.tensorflow")
    tables = {case: splits_of(case, RANKS) for case in CASES}
    cases = {case: (table, arrays_of(table)) for case, table in tables.items()}
    (tmp_path / "cases.pickle").write_bytes(pickle.dumps(cases))
    ranks = running.outcomes("exchange", name, RANKS, tmp_path, seconds=300)
    for rank, steps in enumerate(ranks):
        for received, first in zip(steps, ranks[0], strict=True):
            assert_same(received["weights"], first["weights"])
            assert_same(received["sums"], [np.full(2, 1 + 2 + 3, dtype) for dtype in SUMMED])
            for case, (table, arrays) in cases.items():
                assert_same(received[case], expected(table, arrays, rank))
        kernels = [received["weights"][0] for received in steps]
        assert kernels[0].dtype == "bfloat16" and not np.array_equal(kernels[0], kernels[1])
