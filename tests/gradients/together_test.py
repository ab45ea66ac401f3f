"""The threads with which tests of this package replace an engine: groups of them, and messages between two."""

import tensorflow as tf


def test_groups_and_messages_of_threads(together):
    def work(c):
        pair = c.group([0, 1] if c.rank < 2 else [3, 2])
        pair.send([tf.constant([c.rank])], 1 - pair.rank, tag="m")
        [received] = pair.receive([tf.TensorSpec([1], tf.int32)], 1 - pair.rank, tag="m")
        [total] = pair.all_reduce([tf.constant([10 * c.rank])], name="sum")
        return pair.rank, int(received[0]), int(total[0])

    assert together(4, work) == [(0, 1, 10), (1, 0, 10), (1, 3, 50), (0, 2, 50)]
