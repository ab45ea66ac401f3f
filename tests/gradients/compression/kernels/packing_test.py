"""Parts of any dtypes are packed into few bytes and unpacked unchanged."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.collectives import OneReplica, SupportedDtypes
from tfdist.gradients.compression.reducers import Packing

DTYPES = [tf.uint8, tf.int8, tf.float16, tf.bfloat16, tf.int32, tf.float32, tf.int64, tf.float64]
SUPPORTED_DTYPES = [
    SupportedDtypes(OneReplica.dtypes.reducible, OneReplica.dtypes.gatherable, packed)
    for packed in (tf.uint8, tf.int32)
]
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def part_of(spec, random):
    size = spec.shape.num_elements()
    return tf.reshape(tf.cast(random.integers(-100, 100, size), spec.dtype), spec.shape)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.builds(tf.TensorSpec, SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=6), st.data())
def test_parts_that_are_joined_are_taken(specs, data):
    dtypes, replicas = data.draw(st.sampled_from(SUPPORTED_DTYPES)), data.draw(st.integers(1, 3))
    packing, random = Packing(tuple(specs), dtypes), np.random.default_rng(0)
    parts = [[part_of(spec, random) for spec in specs] for _ in range(replicas)]
    packed = [packing.to_payload(packing.join(mine)) for mine in parts]
    assert all(vector.dtype == dtypes.packed for vector in packed)
    assert all(vector.shape.num_elements() * dtypes.packed.size == packing.bytes for vector in packed)
    found = packing.take(packing.views(tf.concat(packed, axis=0), replicas))
    for i, spec in enumerate(specs):
        assert (found[i].dtype, found[i].shape) == (spec.dtype, [replicas, *spec.shape])
        for rank in range(replicas):
            assert found[i][rank].numpy().tobytes() == parts[rank][i].numpy().tobytes()
