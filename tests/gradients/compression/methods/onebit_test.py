"""1-bit: the error of each block equals its formula."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tfdist.errors import InputError
from tfdist.gradients.compression.methods.onebit import OneBit

SEED = tf.zeros([2], tf.int32)


def coded(codec, x):
    code = codec.encode(tf.constant(x), SEED)
    assert sum(part.shape.num_elements() * part.dtype.size for part in code) == codec.payload_bytes(x.size)
    return codec.decode(code, x.size).numpy().astype("float64")


@settings(deadline=None, max_examples=60)
@given(arrays("float32", st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
@example(np.zeros(9, "float32"))
@example(np.full(40, 3e38, "float32"))
def test_signs_and_mean_magnitudes(x):
    found = coded(OneBit(block=16), x)
    x = np.where(np.abs(x) < 2.0**-126, 0, x)  # denormals count as zero
    for start in range(0, x.size, 16):
        mine, theirs = (values[start : start + 16].astype("float64") for values in (x, found))
        mean = np.abs(mine).mean()
        np.testing.assert_allclose(theirs, np.where(mine < 0, -mean, mean), rtol=1e-5, atol=2.0**-120)
        error, stated = ((mine - theirs) ** 2).sum(), (mine**2).sum() - np.abs(mine).sum() ** 2 / mine.size
        np.testing.assert_allclose(error, stated, rtol=1e-4, atol=1e-5 * (mine**2).sum() + 1e-70)


def test_a_bit_an_element_and_a_magnitude_a_block():
    assert OneBit().payload_bytes(8_388_608) == 8_388_608 // 8 + 4 * 32768
    assert OneBit(block=64).payload_bytes(65) == 8 + 4 + 1 + 4
    assert OneBit().biased


@pytest.mark.parametrize("block", [0, 7, 12, 2**21, 64.0, True])
def test_bad_block(block):
    with pytest.raises(InputError, match=f"onebit needs block to be a multiple of 8 from 8 to .* Received: {block}"):
        OneBit(block=block)
