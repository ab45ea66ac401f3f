"""Graphs that contain Horovod's operations; needs no other process."""

import pytest
import tensorflow as tf
from tensorflow.python.ops import op_selector

pytest.importorskip("horovod.tensorflow")

from tfdist.collectives.no_constant_folding import hide_constant


def test_a_message_waits_for_nothing_but_its_tensor():
    """Otherwise all messages would be sent at the end of the backward pass, whose end is timed before them."""

    @tf.function(autograph=False)
    def step(gradient):
        timed = tf.timestamp()
        message = hide_constant(gradient)
        types.update(op.type for op in op_selector.get_backward_walk_ops(message.op, control_inputs=True))
        return message, timed

    types: set[str] = set()
    step(tf.ones([3, 2]))
    assert "Slice" in types
    assert "Timestamp" not in types
