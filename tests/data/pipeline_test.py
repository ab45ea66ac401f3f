"""Pipelines: rows of replicas in training and evaluation; existing global batches, whose checksums are noted."""

import functools
import itertools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data import ArraySource, EvaluationPipeline, Pipeline, StreamSource, row_range
from tfdist.data.batches import checksum, count_rows, replica_part, split_batches
from tfdist.data.row_partition import ReplicaRows
from tfdist.data.source import indices
from tfdist.errors import InputError

SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=6)
KINDS = ["source", "stream"]


@functools.cache
def numbers(kind, size):
    """Returns a dataset of examples (i, -i), whose values identify them."""
    arrays = (np.arange(size), -np.arange(size))
    return ArraySource(arrays) if kind == "source" else StreamSource(tf.data.Dataset.from_tensor_slices(arrays), 5)


def shares(dataset, locals_, steps):
    """Returns the examples of each local replica: {(step, replica): examples}, with steps from 0."""
    elements = dataset.take(steps * len(locals_)).as_numpy_iterator()
    return dict(zip(itertools.product(range(steps), locals_), map(own, elements), strict=True))


def own(element):
    """Returns the examples that count, of a batch or of `ReplicaRows`, which have at least one row."""
    x, rows = (element.batch[0], element.rows) if isinstance(element, ReplicaRows) else (element[0], None)
    assert len(x)
    return x[:rows].tolist()


def allocated(pipeline, steps, processes):
    """Returns the shares of all replicas, which are divided among processes."""
    size = sum(map(len, processes))
    parts = [shares(pipeline.dataset(local, size), local, steps) for local in processes]
    return {key: share for part in parts for key, share in part.items()}


def global_batches(pipeline, steps, processes=((0,),)):
    """Returns the rows of all replicas in order, for each step."""
    found = allocated(pipeline, steps, processes)
    replicas = sum(map(len, processes))
    return [[row for replica in range(replicas) for row in found[step, replica]] for step in range(steps)]


@st.composite
def split_replicas(draw, most):
    """Draws 1 to `most` replicas, divided in order among processes."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).filter(lambda counts: sum(counts) <= most))
    ends = list(itertools.accumulate(counts))
    return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))


@st.composite
def cases(draw):
    batch_size = draw(st.integers(1, 20))
    return draw(st.integers(1, 30)), batch_size, draw(split_replicas(batch_size)), draw(st.integers(0, 9))


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(case=cases())
@SETTINGS
def test_every_row_goes_to_one_replica_and_batches_do_not_depend_on_their_number(kind, case):
    size, batch_size, processes, first = case
    pipeline = Pipeline(numbers(kind, size), batch_size, seed=3, first=first)
    found = allocated(pipeline, 2, processes)
    replicas = sum(map(len, processes))
    for (_, replica), share in found.items():
        assert len(share) == row_range(batch_size, replica, replicas)[1]
    assert global_batches(pipeline, 2, processes) == global_batches(pipeline, 2)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(
    size=st.integers(1, 30), batch_size=st.integers(1, 40), steps=st.integers(0, 7), other=st.integers(1, 40)
)
@SETTINGS
def test_the_first_example_only_skips(kind, size, batch_size, steps, other):
    """Independent of the batch sizes before and after it."""
    first = steps * batch_size
    whole = global_batches(Pipeline(numbers(kind, size), batch_size, seed=5), steps + -(-3 * other // batch_size))
    tail = global_batches(Pipeline(numbers(kind, size), other, seed=5, first=first), 3)
    assert sum(whole, [])[first : first + 3 * other] == sum(tail, [])


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(size=st.integers(1, 30), batch_size=st.integers(1, 40))
@SETTINGS
def test_epochs_are_permutations_end_to_end_in_full_batches(kind, size, batch_size):
    steps = -(-3 * size // batch_size)
    batches = global_batches(Pipeline(numbers(kind, size), batch_size, seed=1), steps)
    assert {len(batch) for batch in batches} == {batch_size}
    stream = [row for batch in batches for row in batch]
    epochs = [stream[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 3
    assert size < 6 or epochs[0] != epochs[1]


def test_a_source_is_read_in_the_order_of_indices():
    batches = global_batches(Pipeline(numbers("source", 11), 4, seed=9, first=8), 5)
    assert sum(batches, []) == indices(tf.range(8, 28, dtype=tf.int64), 11, 9).numpy().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_depends_on_the_seed_alone(kind):
    def stream(seed):
        return global_batches(Pipeline(numbers(kind, 20), 5, seed), 8)

    first = stream(0)
    tf.random.set_seed(99)
    assert stream(0) == first
    assert stream(1) != first
    assert stream(-1) != stream(2**62)


@pytest.mark.parametrize("kind", KINDS)
def test_training_has_no_end_and_static_shapes_where_shares_are_equal(kind):
    pipeline = Pipeline(numbers(kind, 10), 7, seed=0)
    assert pipeline.dataset([0], 1).cardinality() == tf.data.INFINITE_CARDINALITY
    shapes = [pipeline.dataset(*share).element_spec[0].shape for share in (([0], 1), ([0, 1], 3), ([1, 2], 3))]
    assert shapes == [[7], [None], [2]]


def test_more_replicas_than_rows_are_an_error():
    with pytest.raises(InputError, match="--batch_size=2 and 3 replicas"):
        Pipeline(numbers("source", 10), 2, seed=0).dataset([0], 3)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(case=cases())
@SETTINGS
def test_evaluation_is_one_pass_in_order_for_any_number_of_replicas(kind, case):
    size, batch_size, processes, _ = case
    pipeline = EvaluationPipeline(numbers(kind, size), batch_size)
    replicas = sum(map(len, processes))
    for local in processes:
        dataset = pipeline.dataset(local, replicas)
        assert dataset.cardinality() == pipeline.steps * len(local) == len(list(dataset))
    batches = global_batches(pipeline, pipeline.steps, processes)
    assert sum(batches, []) == list(range(size))
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_of_the_last_batch_may_count_on_a_replica(kind):
    pipeline = EvaluationPipeline(numbers(kind, 5), 4)
    found = allocated(pipeline, 2, [(0, 1), (2,)])
    assert found == {(0, 0): [0, 1], (0, 1): [2], (0, 2): [3], (1, 0): [4], (1, 1): [], (1, 2): []}


def test_order_is_deterministic_under_a_transform_of_uneven_speed():
    def slow(x, y):
        tf.py_function(lambda v: __import__("time").sleep(0.01 * float(v % 3)), [x[0]], [])
        return x, y

    plain = global_batches(Pipeline(numbers("source", 12), 2, seed=0), 8)
    assert global_batches(Pipeline(numbers("source", 12).map(slow), 2, seed=0), 8) == plain


@pytest.mark.parametrize("make", [lambda source: Pipeline(source, 2, 0), lambda source: EvaluationPipeline(source, 2)])
def test_no_thread_that_tunes_keeps_an_iterator_from_ending(make):
    """With autotuning, ending a fit could take as long again as the fit itself."""
    dataset = make(ArraySource((np.zeros(5), np.zeros(5)))).dataset([0], 1)
    assert dataset.options().autotune.enabled is False


BATCH = {"a": tf.reshape(tf.range(14), [7, 2]), "b": tf.ragged.constant([[1], [], [2, 3], [4], [], [5], [6, 7, 8]])}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
def test_parts_are_the_batch_in_order_as_even_as_possible(size):
    parts = [replica_part(BATCH, replica, size) for replica in range(size)]
    counts = [int(each.rows) for each in parts]
    assert max(counts) - min(counts) <= 1 and sum(counts) == 7
    assert all(int(count_rows(each.batch)) == max(count, 1) for each, count in zip(parts, counts, strict=True))
    assert {int(each.batch_size) for each in parts} == {7}
    np.testing.assert_array_equal(np.concatenate([each.counted_rows["a"] for each in parts]), BATCH["a"])
    assert [row for each in parts for row in each.counted_rows["b"].to_list()] == BATCH["b"].to_list()


def test_what_is_missing_is_left_out():
    found = replica_part((tf.range(4), tf.experimental.Optional.empty(tf.TensorSpec([])), None), 1, 2)
    assert found.batch[0].numpy().tolist() == [2, 3] and found.batch[1:] == (None, None)


def test_sparse_tensors_are_refused():
    with pytest.raises(InputError, match="Received: a SparseTensor. Apply tf.sparse.to_dense"):
        replica_part(tf.sparse.from_dense(tf.eye(4)), 0, 2)


@pytest.mark.parametrize(("replicas", "size"), [((0,), 1), ((1,), 2), ((2, 3), 4)])
def test_replicas_rows_come_in_turn(replicas, size):
    batches = tf.data.Dataset.range(23).batch(10)
    found = [(each.batch.numpy().tolist(), int(each.batch_size)) for each in split_batches(batches, replicas, size)]
    expected = []
    for batch in batches:
        for replica in replicas:
            whole = replica_part(batch, replica, size)
            expected.append((whole.batch.numpy().tolist(), int(whole.batch_size)))
    assert found == expected


def test_shapes_are_static_where_they_can_be():
    batches = tf.data.Dataset.from_tensors(tf.zeros([8, 3])).repeat(2)
    assert split_batches(batches, [0], 4).element_spec.batch.shape == [2, 3]
    assert split_batches(batches, [0], 3).element_spec.batch.shape == [None, 3]


def test_every_batch_is_noted():
    """The checksum covers every byte of the batch; noted in each pass."""
    notes = []
    data = tf.data.Dataset.range(203).batch(1)
    for _ in split_batches(data, [0, 1], 2, lambda number, found: notes.append((number, found))):
        pass
    assert notes == [(i, checksum([np.array([i])])) for i in range(203)]


def test_checksums_tell_order_and_values_apart():
    x, y = np.arange(6.0), np.arange(6)
    assert checksum([x, y]) == checksum([x.copy(), y.copy()])
    others = [checksum([x[::-1], y]), checksum([y, x]), checksum([x, y + 1]), checksum([x]), checksum([-x, y])]
    assert len({checksum([x, y]), *others}) == 6
    words = np.array([b"ab", b"c"], object)
    assert checksum([words]) != checksum([words[::-1]])


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_checksums_cover_every_part_of_a_batch(rows):
    """The same with compiled code, which reads batches, and for a batch in memory."""
    batch = {
        "x": tf.random.stateless_normal([rows, 3], [0, 0], dtype=tf.float16),
        "flag": tf.ones([rows], tf.bool),
        "word": tf.fill([rows], "word"),
        "ragged": tf.RaggedTensor.from_row_lengths(tf.range(2 * rows), tf.fill([rows], 2)),
        "number": tf.ones([rows], tf.bfloat16),
    }
    notes = []
    for _ in split_batches(tf.data.Dataset.from_tensors(batch), [0], 1, lambda *given: notes.append(given)):
        pass
    assert notes == [(0, checksum(batch))]
    if rows:
        others = {key: tf.nest.map_structure(_changed, batch[key], expand_composites=True) for key in batch}
        assert len({checksum(batch), *(checksum({**batch, key: value}) for key, value in others.items())}) == 6


def _changed(leaf):
    """Changes the last element."""
    if leaf.dtype == tf.string:
        return tf.concat([leaf[:-1], ["other"]], 0)
    flat = tf.reshape(leaf, [-1])
    last = ~flat[-1:] if leaf.dtype == tf.bool else flat[-1:] + 1
    return tf.reshape(tf.concat([flat[:-1], last], 0), leaf.shape)
