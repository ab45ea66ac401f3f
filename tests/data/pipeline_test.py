import functools
import itertools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data import ArraySource, EvaluationPipeline, Pipeline, StreamSource, rows
from tfdist.data.shuffle import indices
from tfdist.errors import InputError

SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=6)
KINDS = ["source", "stream"]


@functools.cache
def numbers(kind, size):
    """Returns a data set of examples (i, -i), whose values identify them."""
    arrays = (np.arange(size), -np.arange(size))
    return ArraySource(arrays) if kind == "source" else StreamSource(tf.data.Dataset.from_tensor_slices(arrays), 5)


def shares(dataset, locals_, steps):
    """Returns the examples of each local replica: {(step, replica): examples}, with steps from 0."""
    elements = dataset.take(steps * len(locals_)).as_numpy_iterator()
    return dict(zip(itertools.product(range(steps), locals_), [x.tolist() for x, *_ in elements], strict=True))


def allocated(pipeline, steps, processes):
    """Returns the shares of all replicas, which are divided among processes."""
    size = sum(map(len, processes))
    return {
        key: share for local in processes for key, share in shares(pipeline.dataset(local, size), local, steps).items()
    }


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
        assert len(share) == rows(batch_size, replica, replicas)[1]
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
    assert pipeline.dataset([0], 1).element_spec[0].shape == [7]
    assert pipeline.dataset([0, 1], 3).element_spec[0].shape == [None]
    assert pipeline.dataset([1, 2], 3).element_spec[0].shape == [2]


def test_more_replicas_than_rows_are_an_error():
    with pytest.raises(InputError, match="--batch_size=2 and 3 replicas"):
        Pipeline(numbers("source", 10), 2, seed=0).dataset([0], 3)


@pytest.mark.parametrize(
    "make", [lambda b: Pipeline(numbers("source", 3), b, 0), lambda b: EvaluationPipeline(numbers("source", 3), b)]
)
def test_the_batch_size_must_be_positive(make):
    with pytest.raises(InputError, match="--batch_size must be at least 1. Received: 0."):
        make(0)


def test_the_first_example_must_not_be_before_the_stream():
    with pytest.raises(InputError, match="first example"):
        Pipeline(numbers("source", 3), 2, seed=0, first=-1)


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
def test_a_replica_may_get_no_row_of_the_last_batch(kind):
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
