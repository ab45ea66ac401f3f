"""Top-k sparsification: sends the largest elements, as values and indices."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.gradients.compression.arguments import selection_size, validate_flag, validate_ratio
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.random_draws import fold_in
from tfdist.gradients.compression.sparse_vector import (
    magnitudes,
    pad_entries,
    sample_size,
    sampled_top_k,
    to_dense,
    top_k,
)

_METHODS = ("exact", "sampled")


class TopK(Codec):
    """Sends the k elements that are largest by magnitude, k = max(1, round(ratio n)).

        C(x)_i = x_i if |x_i| is among the k largest, else 0;   |x - C(x)|^2 <= (1 - k/n) |x|^2

    Cost: k float32 values and k int32 indices, 8 k bytes, which each replica receives from N - 1 others. Encoding is a
    heap over all elements (`exact`) or a threshold from a random sample, then a search among the elements that reach it
    (`sampled`: ten times faster, with the same result except for a few vectors in a thousand, where some entries stay
    unused). n is below 2^31.

    `rescale` scales the values sent to the norm of x. It replaces error feedback, which is then off
    by default: values that are too large would come back as an error of the opposite sign.

    Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017 (arXiv:1704.05021); Stich et al.,
    Sparsified SGD with Memory, 2018 (arXiv:1809.07599).
    """

    compiles = False  # XLA has no heap and would sort all elements

    def __init__(self, *, ratio: float, method: str = "exact", rescale: bool = False):
        """Validates and stores the parameters.

        Args:
          ratio: k/n, in (0, 1].
          method: "exact" or "sampled".
          rescale: whether to rescale the values to the norm of x.
        """
        if method not in _METHODS:
            raise InputError(
                f"topk knows the methods {' and '.join(_METHODS)}. Received: {method!r}. Write one of them."
            )
        self._ratio = validate_ratio("topk", ratio)
        self._rescale = validate_flag("topk", "rescale", rescale)
        self.biased = not rescale
        self.randomized = method == "sampled"

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        """See base class. Returns indices, where negative ones mark unused entries, and values."""
        k = selection_size(self._ratio, x.shape[0])
        if self.randomized:
            indices, values = pad_entries(sampled_top_k(x, k, seed, sample_size(self._ratio)), k)
        else:
            indices, values = top_k(x, k)
        return [indices, values * _norm_ratio(x, values) if self._rescale else values]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        indices, values = code
        return to_dense(indices[None], values[None], size)

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """See base class. Scatters all values into one vector, in the order of ranks."""
        indices, values = codes
        return to_dense(indices, values, size)

    def check(self, x: tf.Tensor, code: Sequence[tf.Tensor]) -> tf.Tensor:
        """See base class. Inf and NaN are among the largest values."""
        return _peak(code[1])

    def payload_bytes(self, size: int) -> int:
        return 8 * selection_size(self._ratio, size)

    def then(self, codec: Codec) -> Codec:
        """Returns a codec that encodes the values with `codec`. Cost: 4 k bytes of indices, and the code of k values."""
        return _EncodedTopK(self, self._ratio, codec)


class _EncodedTopK(Codec):
    """Top-k whose values are encoded by another codec; indices are unchanged."""

    compiles = False

    def __init__(self, topk: TopK, ratio: float, inner: Codec):
        self._topk = topk
        self._ratio = ratio
        self._inner = inner
        self.biased = topk.biased or inner.biased
        self.randomized = topk.randomized or inner.randomized
        self.experimental = topk.experimental or inner.experimental

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        indices, values = self._topk.encode(x, seed)
        return [indices, *self._inner.encode(values, fold_in(seed, 0))]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        indices, *values = code
        return self._topk.decode([indices, self._values(values, size)], size)

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        indices, *values = codes
        rank_values = [self._values([part[rank] for part in values], size) for rank in range(indices.shape[0])]
        return self._topk.sum([indices, tf.stack(rank_values)], size)

    def check(self, x: tf.Tensor, code: Sequence[tf.Tensor]) -> tf.Tensor:
        indices, *values = code
        peak = _peak(self._values(values, x.shape[0]))
        inner = self._inner.check(tf.gather(x, tf.maximum(indices, 0)), values)
        return tf.where(tf.math.is_finite(peak), inner, peak)

    def payload_bytes(self, size: int) -> int:
        k = selection_size(self._ratio, size)
        return 4 * k + self._inner.payload_bytes(k)

    def _values(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        return self._inner.decode(code, selection_size(self._ratio, size))


def _peak(values: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reduce_max(magnitudes(values)), tf.float32)


def _norm_ratio(x: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns |x| / |values|, or 1 if both are 0."""
    peak = tf.reduce_max(tf.abs(values))
    # Divided by the largest magnitude, which is among the values, squares neither overflow nor underflow.
    x_norm, sent_norm = (tf.norm(tf.math.divide_no_nan(vector, peak)) for vector in (x, values))
    return tf.where(sent_norm > 0, x_norm / sent_norm, 1.0)
