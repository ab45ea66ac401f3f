"""Numbers of a few bits are packed into the minimum number of bytes, and unpacked unchanged."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.gradients.compression.kernels.bit_packing import in_pieces, pack_bits, packed_length, unpack_bits


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_what_is_packed_is_unpacked(bits, size, seed):
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
def test_xla_packs_the_same_bytes(bits):
    numbers = tf.constant(np.random.default_rng(0).integers(0, 2**bits, 1003).astype("uint8"))
    compiled = tf.function(pack_bits, jit_compile=True, autograph=False)
    np.testing.assert_array_equal(compiled(numbers, bits), pack_bits(numbers, bits))


def test_pieces_keep_their_place():
    numbers, offsets = np.arange(19, dtype="uint8") % 4, np.arange(19, dtype="float32")
    pieces = unpack_bits(pack_bits(tf.constant(numbers), 2), 19, 2)
    assert len(pieces) > 1
    found = in_pieces(lambda piece, scale: tf.cast(piece, tf.float32) + scale, pieces, tf.constant(offsets))
    np.testing.assert_array_equal(tf.concat(found, axis=0), numbers + offsets)
