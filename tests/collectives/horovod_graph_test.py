"""Graphs that contain Horovod's operations; needs no other process."""

import pytest
import tensorflow as tf

pytest.importorskip("horovod.tensorflow")

from tfdist.collectives.no_constant_folding import hide_constant


def ancestors(tensor):
    found, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            left += [each.op for each in operation.inputs] + list(operation.control_inputs)
    return {operation.type for operation in found}


def test_a_message_waits_for_nothing_but_its_tensor():
    """Otherwise all messages would be sent at the end of the backward pass, whose end is timed before them."""

    @tf.function(autograph=False)
    def step(gradient):
        timed = tf.timestamp()
        message = hide_constant(gradient)
        types.update(ancestors(message))
        return message, timed

    types: set[str] = set()
    step(tf.ones([3, 2]))
    assert "Slice" in types
    assert "Timestamp" not in types
