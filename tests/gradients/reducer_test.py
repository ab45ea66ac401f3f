"""The reducer contract, the exact sum, and partitions: each tensor is reduced by its own reducer, and comes back in order."""

import numpy as np
import tensorflow as tf

from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.distribution.strategy import State
from tfdist.gradients import PartitionedReducer, Reducer, ReductionResult, Sum


class Scaling(Reducer):
    def __init__(self, factor):
        self._factor = factor

    def state(self, specs):
        return [State(f"{spec.name}/factor", (), tf.float32, False) for spec in specs]

    def reduce(self, tensors, state, collectives, *, name):
        totals = collectives.all_reduce([self._factor * tensor for tensor in tensors], name=name)
        sent = [-self._factor * tensor for tensor in tensors]
        return ReductionResult(totals, sent, [value + self._factor for value in state], [tf.constant(self._factor)])


TENSORS = [tf.fill([size], float(size)) for size in range(1, 6)]
PARTITIONED = PartitionedReducer([([3, 0], Scaling(10.0)), ([2], Sum()), ([], Scaling(99.0)), ([1, 4], Scaling(100.0))])


def test_each_tensor_of_a_partition_comes_back_to_its_place():
    state = [tf.constant(float(i)) for i in range(4)]
    reduced = PARTITIONED.reduce(TENSORS, state, OneReplica(), name="g")
    factors = [10, 100, 1, 10, 100]
    for tensor, factor, total, sent in zip(TENSORS, factors, reduced.totals, reduced.sent, strict=True):
        np.testing.assert_array_equal(total, factor * tensor)
        np.testing.assert_array_equal(sent, tensor if factor == 1 else -factor * tensor)
    assert [float(value) for value in reduced.state] == [10, 11, 102, 103]
    assert [float(tf.reduce_max(witness)) for witness in reduced.witnesses] == [10, 3, 100]


def test_states_are_those_of_the_partitions_in_their_order():
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype, f"v{i}") for i, tensor in enumerate(TENSORS)]
    assert [state.name for state in PARTITIONED.state(specs)] == ["v3/factor", "v0/factor", "v1/factor", "v4/factor"]


def test_a_partition_without_tensors_sends_nothing_and_names_are_unique():
    recording = RecordingCollectives(OneReplica())
    PARTITIONED.reduce(TENSORS, [tf.constant(0.0)] * 4, recording, name="g")
    assert [call.name for call in recording.calls] == ["g/partition0", "g/partition1", "g/partition2"]
    assert [len(call.shapes) for call in recording.calls] == [2, 1, 2]
