"""Compression of messages between stages: error bounds, bytes, and what must survive it."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import SupportedDtypes
from tfdist.config.pipeline import ACTIVATION_COMPRESSION
from tfdist.pipelining.activation_compression import METHODS, MIN_ELEMENTS, message_bytes

SUPPORTED_DTYPES = {
    "tensorflow": SupportedDtypes(frozenset(), frozenset([tf.float16, tf.int32]), tf.int32),
    "horovod": SupportedDtypes(frozenset(), frozenset([tf.float16, tf.uint8]), tf.uint8),
}
SIZES = [(4, 256), (33, 32), (3, 7, 151), (64, 512)]  # whole blocks; others; compiled by XLA
COMPRESSED = ACTIVATION_COMPRESSION[1:]


def passed(name: str, x: tf.Tensor, dtypes: SupportedDtypes = SUPPORTED_DTYPES["tensorflow"]) -> tf.Tensor:
    """Returns what the receiver decodes."""
    method, spec = METHODS[name](), tf.TensorSpec(x.shape, x.dtype)
    sent = method.encode(x, dtypes)
    assert (sent.shape, sent.dtype) == (
        method.message_spec(spec, dtypes).shape,
        method.message_spec(spec, dtypes).dtype,
    )
    found = method.decode(sent, spec, dtypes)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    return found


def values(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Returns numbers of different magnitudes, with a block of zeros and one of denormals."""
    generator = np.random.default_rng(len(shape))
    flat = generator.standard_normal(int(np.prod(shape))) * np.exp(generator.normal(0, 2, int(np.prod(shape))))
    flat[:256], flat[256:512] = 0.0, 1e-41
    return flat.reshape(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def test_each_method_is_a_choice_of_the_flag() -> None:
    assert tuple(METHODS) == ACTIVATION_COMPRESSION


@pytest.mark.parametrize("dtypes", SUPPORTED_DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_errors_are_bounded(shape: tuple[int, ...], dtypes: str) -> None:
    x = values(shape)
    flat = x.reshape(-1)
    parts = np.split(flat, range(256, len(flat), 256))
    blocks = np.concatenate([np.full(len(part), np.abs(part).max()) for part in parts])
    bounds = {"none": 0 * blocks, "bf16": 2.0**-8 * np.abs(flat), "fp16": 2.0**-11 * np.abs(flat), "int8": blocks / 254}
    for name, bound in bounds.items():
        error = np.abs(passed(name, tf.constant(x), SUPPORTED_DTYPES[dtypes]).numpy().reshape(-1) - flat)
        assert np.all(error <= bound * (1 + 1e-5) + (2.0**-25 if name == "fp16" else 2.0**-126)), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("name", COMPRESSED)
def test_what_was_decoded_is_sent_on_unchanged(name: str, shape: tuple[int, ...], dtype: str) -> None:
    once = passed(name, tf.constant(values(shape, dtype)))
    np.testing.assert_array_equal(passed(name, once).numpy(), once.numpy())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [SIZES[0], SIZES[-1]])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", COMPRESSED)
def test_what_is_not_finite_stays_so(name: str, bad: float, shape: tuple[int, ...], dtype: str) -> None:
    x = values(shape, dtype)
    x[-1, -1] = bad
    found = passed(name, tf.constant(x)).numpy().reshape(-1)
    assert not np.isfinite(found[-1])
    assert np.isfinite(found[:-256]).all()


@pytest.mark.parametrize("name", COMPRESSED)
def test_small_tensors_integers_and_masks_are_sent_as_they_are(name: str) -> None:
    small = tf.constant(values((1, MIN_ELEMENTS - 1)))
    for x in (small, tf.range(4096), tf.constant([True] * 4096)):
        assert METHODS[name]().encode(x, SUPPORTED_DTYPES["tensorflow"]) is x


@pytest.mark.parametrize("dtypes", SUPPORTED_DTYPES)
def test_bytes(dtypes: str) -> None:
    def size(name: str, dtype: tf.DType) -> int:
        spec = METHODS[name]().message_spec(tf.TensorSpec([16, 256], dtype), SUPPORTED_DTYPES[dtypes])
        return spec.shape.num_elements() * spec.dtype.size

    sizes = {name: size(name, tf.float32) for name in METHODS}
    assert sizes == {"none": 16384, "bf16": 8192, "fp16": 8192, "int8": 4096 + 4 * 16 + 4}
    assert size("bf16", tf.float16) == size("fp16", tf.float16) == 8192, "not smaller: sent as it is"


@pytest.mark.parametrize(
    ("dtype", "dtypes", "sent"),
    [("bool", "tensorflow", 4), ("float32", "tensorflow", 4), ("bfloat16", "horovod", 2), ("uint8", "horovod", 1)],
)
def test_messages_have_a_dtype_that_the_engine_sends(dtype: str, dtypes: str, sent: int) -> None:
    assert message_bytes(tf.TensorSpec([3], dtype), METHODS["none"](), SUPPORTED_DTYPES[dtypes]) == 3 * sent
