"""Which process writes what of a pipelined model."""

import types

import pytest
import tensorflow as tf

from tfdist.pipelining.stage_parts import StageBlocks


@pytest.mark.parametrize("replica", [0, 1])
def test_of_the_replicas_of_a_stage_the_first_writes_what_all_have(replica: int) -> None:
    strategy = types.SimpleNamespace(local_replicas=range(replica, replica + 1), local=lambda value: [value])
    blocks, variable = StageBlocks(strategy), tf.Variable([1.0, 2.0])
    assert [offset for offset, _ in blocks.saved_blocks(variable, per_replica=False)] == [(0,)] * (replica == 0)
    assert [offset for offset, _ in blocks.saved_blocks(variable, per_replica=True)] == [(replica, 0)]
