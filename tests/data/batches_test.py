"""Existing global batches: their rows are distributed to replicas, and their checksums are noted."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.batches import checksum, count_rows, part, split_batches
from tfdist.errors import InputError

BATCH = {"a": tf.reshape(tf.range(14), [7, 2]), "b": tf.ragged.constant([[1], [], [2, 3], [4], [], [5], [6, 7, 8]])}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
def test_parts_are_the_batch_in_order_as_even_as_possible(size):
    parts = [part(BATCH, replica, size) for replica in range(size)]
    counts = [int(count_rows(each.batch)) for each in parts]
    assert max(counts) - min(counts) <= 1 and sum(counts) == 7
    assert {int(each.batch_size) for each in parts} == {7}
    np.testing.assert_array_equal(np.concatenate([each.batch["a"] for each in parts]), BATCH["a"])
    assert [row for each in parts for row in each.batch["b"].to_list()] == BATCH["b"].to_list()


def test_what_is_missing_is_left_out():
    found = part((tf.range(4), tf.experimental.Optional.empty(tf.TensorSpec([])), None), 1, 2)
    assert found.batch[0].numpy().tolist() == [2, 3] and found.batch[1:] == (None, None)


def test_sparse_tensors_are_refused():
    with pytest.raises(InputError, match="Received: a SparseTensor. Use tf.sparse.to_dense"):
        part(tf.sparse.from_dense(tf.eye(4)), 0, 2)


@pytest.mark.parametrize(("replicas", "size"), [((0,), 1), ((1,), 2), ((2, 3), 4)])
def test_replicas_rows_come_in_turn(replicas, size):
    batches = tf.data.Dataset.range(23).batch(10)
    found = [(each.batch.numpy().tolist(), int(each.batch_size)) for each in split_batches(batches, replicas, size)]
    expected = []
    for batch in batches:
        for replica in replicas:
            whole = part(batch, replica, size)
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
