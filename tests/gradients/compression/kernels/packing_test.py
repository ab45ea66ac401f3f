"""Numbers of a few bits, and parts of any dtypes, are packed into few bytes and unpacked unchanged."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.collectives import OneReplica, Wire
from tfdist.gradients.compression.bit_packing import map_pieces, pack_bits, packed_length, unpack_bits
from tfdist.gradients.compression.reducers import Packing


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_bits_that_are_packed_are_unpacked(bits, size, seed):
    numbers = np.random.default_rng(seed).integers(0, 2**bits, size).astype("uint8")
    packed = pack_bits(tf.constant(numbers), bits)
    assert packed.shape == [packed_length(size, bits)]
    assert packed.dtype == tf.uint8
    np.testing.assert_array_equal(tf.concat(unpack_bits(packed, size, bits), axis=0), numbers)


@pytest.mark.parametrize("bits", range(1, 9))
def test_eight_numbers_of_some_bits_are_as_many_bytes(bits):
    assert packed_length(8000, bits) == 1000 * bits
    assert packed_length(8001, bits) == (8001 if bits == 8 else 1001 * bits)


@pytest.mark.parametrize("bits", [1, 5])
def test_xla_packs_bits_into_the_same_bytes(bits):
    numbers = tf.constant(np.random.default_rng(0).integers(0, 2**bits, 1003).astype("uint8"))
    compiled = tf.function(pack_bits, jit_compile=True, autograph=False)
    np.testing.assert_array_equal(compiled(numbers, bits), pack_bits(numbers, bits))


def test_pieces_keep_their_place():
    numbers, offsets = np.arange(19, dtype="uint8") % 4, np.arange(19, dtype="float32")
    pieces = unpack_bits(pack_bits(tf.constant(numbers), 2), 19, 2)
    assert len(pieces) > 1
    found = map_pieces(lambda piece, scale: tf.cast(piece, tf.float32) + scale, pieces, tf.constant(offsets))
    np.testing.assert_array_equal(tf.concat(found, axis=0), numbers + offsets)


DTYPES = [tf.uint8, tf.int8, tf.float16, tf.bfloat16, tf.int32, tf.float32, tf.int64, tf.float64]
WIRES = [Wire(OneReplica.wire.reduces, OneReplica.wire.gathers, packed) for packed in (tf.uint8, tf.int32)]
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def part_of(spec, random):
    size = spec.shape.num_elements()
    return tf.reshape(tf.cast(random.integers(-100, 100, size), spec.dtype), spec.shape)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.builds(tf.TensorSpec, SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=6), st.data())
def test_parts_that_are_joined_are_taken(specs, data):
    wire, replicas = data.draw(st.sampled_from(WIRES)), data.draw(st.integers(1, 3))
    packing, random = Packing(tuple(specs), wire), np.random.default_rng(0)
    parts = [[part_of(spec, random) for spec in specs] for _ in range(replicas)]
    packed = [packing.to_wire(packing.join(mine)) for mine in parts]
    assert all(vector.dtype == wire.packed for vector in packed)
    assert all(vector.shape.num_elements() * wire.packed.size == packing.bytes for vector in packed)
    found = packing.take(packing.views(tf.concat(packed, axis=0), replicas))
    for i, spec in enumerate(specs):
        assert (found[i].dtype, found[i].shape) == (spec.dtype, [replicas, *spec.shape])
        for rank in range(replicas):
            assert found[i][rank].numpy().tobytes() == parts[rank][i].numpy().tobytes()


@pytest.mark.parametrize("wire", WIRES, ids=["bytes", "int32"])
@pytest.mark.parametrize(
    ("specs", "length"),
    [
        ([([3], tf.uint8), ([1], tf.float32)], 8),
        ([([4], tf.uint8), ([1], tf.float32)], 8),
        ([([5], tf.uint8), ([1], tf.float32)], 12),
        ([([3], tf.float16), ([1], tf.float64)], 16),
    ],
)
def test_the_whole_is_filled_up_to_the_largest_element(specs, length, wire):
    packing = Packing(tuple(tf.TensorSpec(*spec) for spec in specs), wire)
    assert packing.bytes == length
    joined = packing.join([tf.ones(*spec) for spec in specs])
    assert joined.shape.num_elements() * joined.dtype.size == length


def test_bytes_are_filled_up_to_the_wire():
    assert [Packing((tf.TensorSpec([5], tf.uint8),), wire).bytes for wire in WIRES] == [5, 8]


def test_xla_joins_and_takes_the_same():
    specs = tuple(
        tf.TensorSpec(shape, dtype) for shape, dtype in [([1], tf.float32), ([7], tf.uint8), ([3], tf.float16)]
    )
    packing = Packing(specs, WIRES[0])
    parts = [part_of(spec, np.random.default_rng(0)) for spec in specs]
    join, take = (tf.function(work, jit_compile=True, autograph=False) for work in (packing.join, packing.take))
    joined = join(parts)
    np.testing.assert_array_equal(joined, packing.join(parts))
    for part, found in zip(parts, take(packing.views(packing.to_wire(joined), 1)), strict=True):
        np.testing.assert_array_equal(found[0], part)
