"""Sparsification: sends the elements of the largest magnitudes, as values and indices."""

import copy
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.errors import InputError, is_number
from tfdist.gradients.compression.arguments import (
    selection_size,
    validate_integer,
    validate_positive,
    validate_ratio,
)
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.random_draws import fold_in
from tfdist.gradients.compression.reducers import VectorSum, Vectorwise, finiteness_flag, seed_of
from tfdist.gradients.compression.sparse_vector import (
    SparseVector,
    magnitudes,
    pad_entries,
    peaks,
    sample_size,
    sampled_top_k,
    select_by_threshold,
    sum_sparse,
    to_dense,
    top_k,
)
from tfdist.gradients.reducer import ReductionResult, Tensors


class TopK(Codec):
    """Sends the k elements that are largest by magnitude, k = max(1, round(ratio n)).

        C(x)_i = x_i if |x_i| is among the k largest, else 0;   |x - C(x)|^2 <= (1 - k/n) |x|^2

    Cost: k float32 values and k int32 indices, 8 k bytes, which each replica receives from N - 1 others. Encoding uses a
    heap of all elements (`exact`), or a threshold from a random sample and a search among the elements that reach it
    (`sampled`: ten times faster, with the same result except for a few vectors in a thousand, where some entries stay
    unused). n must be below 2^31.

    Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017 (arXiv:1704.05021); Stich et al.,
    Sparsified SGD with Memory, 2018 (arXiv:1809.07599).
    """

    biased = True
    compiles = False  # XLA has no heap and would sort all elements

    def __init__(self, *, ratio: float, method: str = "exact"):
        """Validates and stores the parameters.

        Args:
          ratio: k/n, in (0, 1].
          method: "exact" or "sampled".
        """
        if method not in ("exact", "sampled"):
            raise InputError(f"topk supports the methods exact and sampled. Received: {method!r}. Use one of these.")
        self._ratio = validate_ratio("topk", ratio)
        self._is_sampled = self.randomized = method == "sampled"
        self._values: Codec = _Identity()

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        """See base class. Returns indices, where negative ones mark unused entries, and the code of the values."""
        k = selection_size(self._ratio, x.shape[0])
        if self._is_sampled:
            indices, values = pad_entries(sampled_top_k(x, k, seed, sample_size(self._ratio)), k)
        else:
            indices, values = top_k(x, k)
        return [indices, *self._values.encode(values, fold_in(seed, 0))]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        return self.sum([part[None] for part in code], size)

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """See base class. Scatters all values into one vector, in the order of ranks."""
        indices, *values = codes
        replicas, k = indices.shape
        decoded = [self._values.decode([part[rank] for part in values], k) for rank in range(replicas)]
        return to_dense(indices, tf.stack(decoded), size)

    def check(self, x: tf.Tensor, code: Sequence[tf.Tensor]) -> tf.Tensor:
        """See base class. Inf and NaN are among the largest values."""
        indices, *values = code
        peak = peaks(self._values.decode(values, indices.shape[0])[None])[0]
        return tf.where(tf.math.is_finite(peak), self._values.check(tf.gather(x, tf.maximum(indices, 0)), values), peak)

    def then(self, codec: Codec) -> "TopK":
        """Returns a copy that encodes the values with a codec. Cost: 4 k bytes of indices, and the code of k values."""
        result = copy.copy(self)
        result._values = codec
        result.randomized = self.randomized or codec.randomized
        result.experimental = codec.experimental
        return result


class _Identity(Codec):
    biased = False

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        return [x]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        return code[0]


class Threshold(Vectorwise):
    """Sends all elements of at least a given magnitude, however many there are.

        C(x)_i = x_i if |x_i| >= value, else 0;   |x - C(x)|_inf < value

    Cost: 8 (m + 1) bytes for the m elements that reach the value (a value and an index for each, and one pair for m and
    the finiteness flag), which each replica receives from N - 1 others; more than an exact sum if m > n / N. m
    differs between replicas and steps. Experimental, because no single value suits all tensors and all of the training.

    Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015; Dryden et al., Communication
    Quantization for Data-Parallel Training of Deep Neural Networks, 2016.
    """

    biased = True
    experimental = True

    def __init__(self, *, value: float):
        """Validates and stores the parameters.

        Args:
          value: smallest magnitude that is sent, in units of the gradient, above 0.
        """
        value = min(validate_positive("threshold", "value", value), float(np.finfo(np.float32).max))
        self._bits = max(1, int(np.float32(value).view(np.int32)))

    def sum_vector(self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str) -> VectorSum:
        selection = select_by_threshold(x, self._bits)
        total, checks = sum_sparse(*selection, finiteness_flag(selection.values), x.shape[0], collectives, name=name)
        return total, tf.where(magnitudes(x) >= self._bits, x, 0.0), checks


class DGC(Vectorwise):
    """Sends the largest elements of the accumulated momentum updates, and stores the rest.

        g  = gradient, scaled to a norm of at most clip_norm / sqrt(N)     (each tensor's own norm)
        u' = momentum u + g,   v' = v + u'                                 (momentum correction)
        the k largest |v'| are sent, k = max(1, round(ratio n)); there u = v = 0, elsewhere u', v' (factor masking)

    The sums are updates that already include momentum: **use it with `sgd` without momentum**. Other momentum would be
    applied twice, and adaptive optimizers would see an occasional gradient instead of one per step. v stores what was
    not sent, so error feedback is off and must stay off.

    Warmup: over the first `warmup_steps`, the ratio decreases exponentially from `warmup_ratio` to `ratio`. Messages are
    not padded to the largest k: an all-gather of unequal sizes sends only the k elements of each step.

    Cost: 8 (k + 1) bytes (a value and an index each, and one row with k and whether the tensor was finite), which each
    replica receives from N - 1 others; 8 n bytes of memory.

    Lin et al., Deep Gradient Compression, 2018 (arXiv:1712.01887); there the ratio is 0.001, and the warmup four epochs
    starting at 0.25.
    """

    keeps_shapes = True  # the norm, k and the state are per variable
    stores_unsent = True

    def __init__(
        self,
        *,
        ratio: float,
        momentum: float = 0.9,
        clip_norm: float | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float = 0.25,
    ):
        """Validates and stores the parameters.

        Args:
          ratio: fraction of elements sent, in (0, 1].
          momentum: in [0, 1).
          clip_norm: maximum norm of a gradient, above 0; None for no clipping.
          warmup_steps: number of warmup steps, from 0 to 2**24.
          warmup_ratio: ratio at the first step of the warmup, in (0, 1] and at least `ratio`.
        """
        self._ratio, self._warmup_ratio = validate_ratio("dgc", ratio), validate_ratio("dgc", warmup_ratio)
        if not is_number(momentum) or not 0 <= momentum < 1:
            raise InputError(f"dgc needs a momentum in [0, 1). Received: {momentum!r}. For example, use momentum=0.9.")
        validate_integer("dgc", "warmup_steps", warmup_steps, 0, 2**24)
        if warmup_steps and self._warmup_ratio < self._ratio:
            raise InputError(
                f"dgc needs a warmup_ratio of at least ratio. Received: {warmup_ratio=}, {ratio=}. Raise warmup_ratio."
            )
        self._momentum, self._warmup_steps = float(momentum), int(warmup_steps)
        self._clip_norm = None if clip_norm is None else validate_positive("dgc", "clip_norm", clip_norm)

    def vector_state(self, spec: tf.TensorSpec) -> list[State]:
        """See base class. Returns the states of u, v and the number of steps so far."""
        return [
            State(f"{spec.name}/velocity", tuple(spec.shape), tf.float32, per_replica=True),
            State(f"{spec.name}/residual", tuple(spec.shape), tf.float32, per_replica=True),
            State(f"{spec.name}/steps", (), tf.int32, per_replica=False),
        ]

    def reduce_vector(self, x: tf.Tensor, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        velocity, residual, steps = state
        velocity, candidate = self._accumulate(x, velocity, residual, collectives.size)
        selection = self._select_largest(candidate, seed_of(name, steps, collectives.rank), steps)
        # If k is static, so is the length of the message: the bytes sent are then known without a run.
        entries = selection if self._warmup_steps else pad_entries(selection, selection_size(self._ratio, x.shape[0]))
        total, checks = sum_sparse(*entries, finiteness_flag(selection.values), x.shape[0], collectives, name=name)
        velocity, residual = _zero_at(velocity, selection.indices), _zero_at(candidate, selection.indices)
        new_state = [tf.reshape(new, old.shape) for new, old in zip((velocity, residual), state, strict=False)]
        return ReductionResult([total], [candidate - residual], [*new_state, steps + 1], [checks])

    def _accumulate(
        self, x: tf.Tensor, velocity: tf.Tensor, residual: tf.Tensor, replicas: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the new velocity and residual, as vectors, before anything is sent."""
        if self._clip_norm is not None:
            x *= tf.minimum(1.0, self._clip_norm / math.sqrt(replicas) / tf.norm(x))
        velocity = self._momentum * tf.reshape(velocity, [-1]) + x
        return velocity, tf.reshape(residual, [-1]) + velocity

    def _select_largest(self, x: tf.Tensor, seed: tf.Tensor, steps: tf.Tensor) -> SparseVector:
        k: int | tf.Tensor = selection_size(self._ratio, x.shape[0])
        if self._warmup_steps:
            progress = tf.minimum(tf.cast(steps, tf.float32) / self._warmup_steps, 1.0)
            ratio = self._warmup_ratio * tf.pow(self._ratio / self._warmup_ratio, progress)
            warmup_k = tf.maximum(tf.cast(tf.round(ratio * x.shape[0]), tf.int32), k)
            k = tf.where(steps < self._warmup_steps, warmup_k, k)
        return sampled_top_k(x, k, seed, sample_size(self._ratio))


def _zero_at(x: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_update(x, indices[:, None], tf.zeros_like(indices, tf.float32))
