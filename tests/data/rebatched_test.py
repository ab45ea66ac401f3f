"""Data of TensorFlow, Keras and generators: single examples, and batches, whose rows are one stream, cut into full batches."""

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data.reading import everything
from tfdist.data import EvaluationPipeline, Pipeline, StreamSource, as_examples, explain_reading_errors
from tfdist.data.examples import PartialEpochs
from tfdist.errors import InputError

NUMBERS = np.arange(7)
DATASET = tf.data.Dataset.from_tensor_slices((NUMBERS, -NUMBERS[:, None])).batch(3)


class Batches(keras.utils.PyDataset):
    """Three batches, of 3, 3 and 1 rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self.epochs = []

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = NUMBERS[3 * index : 3 * index + 3]
        return {"a": rows}, -rows[:, None]

    def on_epoch_begin(self):
        self.epochs.append("begin")

    def on_epoch_end(self):
        self.epochs.append("end")


def generator(batches=10**9):
    for number in range(batches):
        yield NUMBERS[:3] + 3 * number, np.zeros((3, 1))


def rows(source, steps, batch_size=3, *, seed=0, first=0, replicas=(0,), size=1):
    batches = Pipeline(source, batch_size, seed, first).dataset(list(replicas), size).take(steps * len(replicas))
    return [tf.nest.flatten(x)[0].tolist() for x, _ in batches.as_numpy_iterator()]


def test_rows_are_cut_into_full_batches_in_their_order():
    source = as_examples(DATASET)
    assert (source.size, source.batch_size, source.element_spec[1].shape) == (7, 3, (1,))
    assert rows(source, 4) == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]
    assert rows(source, 3, batch_size=5) == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6, 0]]


@pytest.mark.parametrize("data", [DATASET, Batches(), DATASET.repeat()], ids=["dataset", "PyDataset", "endless"])
@pytest.mark.parametrize("first", [0, 2, 3, 7, 8, 20])
def test_a_stream_goes_on_from_any_row(data, first):
    source = as_examples(data, steps=3)
    whole = sum(rows(source, 30, batch_size=1), [])
    assert sum(rows(source, 3, batch_size=3, first=first), []) == whole[first : first + 9]


def test_replicas_share_each_batch():
    source = as_examples(DATASET)
    shares = [rows(source, 4, batch_size=5, replicas=[replica], size=2) for replica in (0, 1)]
    assert [a + b for a, b in zip(*shares, strict=True)] == rows(source, 4, batch_size=5)


def test_an_evaluation_uses_every_row_once():
    batches = EvaluationPipeline(as_examples(DATASET), 4).dataset([0], 1)
    assert [x.tolist() for (x, _), *_ in batches.as_numpy_iterator()] == [[0, 1, 2, 3], [4, 5, 6]]
    batches = EvaluationPipeline(PartialEpochs(as_examples(DATASET), 4), 2).dataset([0], 1)
    assert [x.tolist() for (x, _), *_ in batches.as_numpy_iterator()] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_has_its_batches_in_another_order_in_each_epoch_by_the_seed(workers):
    source = as_examples(Batches(workers=workers))
    assert source.size == 7
    epochs = [rows(source, 7, batch_size=1, first=7 * epoch) for epoch in range(6)]
    assert all(sorted(sum(epoch, [])) == NUMBERS.tolist() for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 1
    assert rows(source, 42, batch_size=1, seed=1) != rows(source, 42, batch_size=1) == sum(epochs, [])
    assert rows(source.in_order(), 4) == rows(as_examples(DATASET), 4)


def test_a_py_dataset_is_told_of_epochs():
    data = Batches()
    assert len(rows(as_examples(data), 5)) == 5
    assert data.epochs[:3] == ["begin", "end", "begin"]


def test_a_generator_is_read_once_and_has_a_sample():
    source = as_examples(generator(), steps=4)
    assert (source.size, source.batch_size) == (12, 3)
    iterator = iter(Pipeline(source, 3, 0).dataset([0], 1))
    assert [next(iterator)[0].numpy().tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert sorted(rows(source.sample, 1)[0]) == [0, 1, 2]
    assert next(iterator)[0].numpy().tolist() == [6, 7, 8]


class Pair(NamedTuple):
    """An example, or a batch, with names."""

    features: Any
    target: Any


class Made(keras.utils.PyDataset):
    """Two batches of three rows, as a function makes them."""

    def __init__(self, made):
        super().__init__()
        self._made = made

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self._made(NUMBERS[3 * index : 3 * index + 3], -NUMBERS[3 * index : 3 * index + 3, None])


@pytest.mark.parametrize(
    "data",
    [
        DATASET.take(2).map(Pair),
        DATASET.take(2).filter(lambda *_: True).map(Pair),
        Made(Pair),
        Made(lambda x, y: [x, y, None]),
        (Pair(NUMBERS[begin : begin + 3], -NUMBERS[begin : begin + 3, None]) for begin in (0, 3)),
        ((NUMBERS[begin : begin + 3], -NUMBERS[begin : begin + 3, None], None) for begin in (0, 3)),
        DATASET.take(2).map(lambda x, y: (x, y, None)),
    ],
    ids=["dataset", "dataset of unknown size", "PyDataset", "PyDataset of lists", "generator", "None", "dataset, None"],
)
def test_batches_may_be_named_tuples_or_lists_with_none_for_weights(data):
    source = as_examples(data, 2)
    assert type(source.element_spec) is tuple
    assert rows(source, 1, batch_size=6) == [list(range(6))]


@pytest.mark.parametrize("made", [lambda x, y: x, lambda x, y: (x, None), lambda x, y: [x]], ids=["x", "None", "[x]"])
def test_a_py_dataset_may_have_inputs_alone(made):
    source = as_examples(Made(made)).in_order()
    assert source.element_spec[1] == ()
    assert rows(source, 1, batch_size=6) == [list(range(6))]


def test_data_of_unknown_size_is_read_once_to_count_it(caplog):
    caplog.set_level("INFO")
    source = as_examples(DATASET.filter(lambda x, y: x[0] > 0))
    assert source.size == 4 and "to count its examples" in caplog.text
    assert rows(source, 2, batch_size=4) == [[3, 4, 5, 6]] * 2


def test_a_function_over_batches_may_change_their_number_of_rows():
    """It could not be seen from the batches that TensorFlow makes, so that half of the rows were left out."""
    twice = as_examples(DATASET.map(lambda x, y: (tf.repeat(x, 2), tf.repeat(y, 2, axis=0))))
    assert (twice.size, twice.batch_size) == (14, 6)
    assert rows(twice, 3, batch_size=6)[2] == [6, 6, 0, 0, 1, 1]


def test_batches_that_make_no_step_are_refused_rather_than_cut():
    class Unequal(Batches):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return ({"a": x["a"][:2]}, y[:2]) if index == 1 else (x, y)

    padded = tf.data.Dataset.range(1, 8).map(lambda n: (tf.fill([n], n), n)).padded_batch(3)
    for data, words in ((Unequal(), "batch 1 with 2 rows"), (padded, r"\[3,3\] and \[3,7\]\. Pad all")):
        source = as_examples(data)
        with pytest.raises(InputError, match=f"Received: {words}"), explain_reading_errors(source):
            rows(source, 4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DATASET.repeat(), "needs `steps_per_epoch` .*Received: a tf.data.Dataset that repeats"),
        (generator(), "needs `steps_per_epoch` .* Received: a generator"),
        (DATASET.take(0), "must have examples. Received: an empty tf.data.Dataset"),
        (DATASET.map(lambda x, y: (x, y, y, y)), r"must be tuples \(x, y\)"),
        (DATASET.map(lambda x, y: (x, {"a": y, "b": None})), "must consist of arrays. Received: y that contains None"),
        ((batch[0] for batch in generator()), "must return a tuple"),
    ],
)
def test_what_is_refused(data, words):
    with pytest.raises(InputError, match=words):
        as_examples(data)


def test_checksums_tell_data_apart():
    found = [as_examples(data).checksum for data in (DATASET, DATASET, DATASET.skip(1))]
    assert found[0] == found[1] != found[2]
    assert PartialEpochs(as_examples(DATASET), 3).checksum == found[0]


def numbered(size):
    return tf.data.Dataset.range(size).map(lambda i: (i, -i))


def batches_of(pipeline, steps):
    return [x.tolist() for x, *_ in pipeline.dataset([0], 1).take(steps).as_numpy_iterator()]


def test_examples_may_be_named_tuples():
    source = StreamSource(numbered(7).map(Pair))
    assert source.size == 7 and source.element_spec == (tf.TensorSpec([], tf.int64),) * 2
    assert everything(source)[0].tolist() == list(range(7))


@pytest.mark.parametrize(
    ("dataset", "found"),
    [(numbered(7).repeat(), "infinite"), (numbered(7).filter(lambda x, y: x > 2), "unknown"), (numbered(0), "0")],
)
def test_the_number_of_examples_must_be_known(dataset, found):
    with pytest.raises(InputError) as error:
        StreamSource(dataset)
    assert f"Received: {found}. Use dataset.apply(tf.data.experimental.assert_cardinality(n))." in str(error.value)


def test_the_remedy_works_and_a_wrong_number_is_noticed():
    filtered = numbered(7).filter(lambda x, y: x > 2)
    right, wrong = (StreamSource(filtered.apply(tf.data.experimental.assert_cardinality(n))) for n in (4, 5))
    assert sorted(sum(batches_of(Pipeline(right, 2, seed=0), 2), [])) == [3, 4, 5, 6]
    with pytest.raises(tf.errors.FailedPreconditionError, match="contain 5 element"):
        batches_of(Pipeline(wrong, 2, seed=0), 8)


def test_the_shuffle_goes_through_a_buffer():
    assert batches_of(Pipeline(StreamSource(numbered(6), buffer_size=1), 6, seed=0), 2) == [[0, 1, 2, 3, 4, 5]] * 2
    [epoch] = batches_of(Pipeline(StreamSource(numbered(100), buffer_size=10), 100, seed=0), 1)
    assert epoch != sorted(epoch)
    assert all(example - place < 10 for place, example in enumerate(epoch))


def test_the_default_buffer_holds_a_small_dataset_and_bounds_the_memory_of_a_large_one():
    small = StreamSource(numbered(3000))
    assert small._buffer_size == 3000
    large = tf.data.Dataset.range(10**6).map(lambda i: (tf.zeros([224, 224, 3], tf.uint8), i))
    assert StreamSource(large)._buffer_size == 2**28 // (224 * 224 * 3 + 8)
    text = tf.data.Dataset.range(10**6).map(lambda i: (tf.as_string(i), i))
    assert StreamSource(text)._buffer_size == 1000


def test_structures_and_static_shapes_pass_through():
    dataset = tf.data.Dataset.range(6).map(lambda i: ({"a": tf.fill([2, 3], i)}, i))
    spec = Pipeline(StreamSource(dataset), 4, seed=0).dataset([0, 1], 2).element_spec
    assert spec == ({"a": tf.TensorSpec([2, 2, 3], tf.int64)}, tf.TensorSpec([2], tf.int64))
