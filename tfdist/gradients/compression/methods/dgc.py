"""Deep gradient compression: top-k of momentum that is accumulated locally until it is sent."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.errors import InputError
from tfdist.errors.formatting import is_number
from tfdist.gradients.compression.arguments import checked_integer, checked_ratio, count_kept
from tfdist.gradients.compression.reducers import ReducedVector, Vectorwise, finiteness_mark, seed_of
from tfdist.gradients.compression.sparse_vector import SparseVector, exchange, largest_sampled, padded, sample_size


class DGC(Vectorwise):
    """Sends the largest elements of the accumulated momentum updates, and stores the rest.

        g  = gradient, scaled to a norm of at most clip_norm / sqrt(N)     (each tensor's own norm)
        u' = momentum u + g,   v' = v + u'                                 (momentum correction)
        the k largest |v'| are sent, k = max(1, round(ratio n)); there u = v = 0, elsewhere u', v' (factor masking)

    The sums are updates that already include momentum: **use it with `sgd` without momentum**; any other momentum would
    be applied a second time, and adaptive optimizers would see an occasional gradient instead of one per step. v stores
    what was not sent, so error feedback is off and must stay off.

    Warmup: over the first `warmup_steps`, the ratio decreases exponentially from `warmup_ratio` to `ratio`. Nothing is
    padded to the largest k for that: an all-gather of unequal sizes sends only what the k of each step needs.

    Cost: 8 (k + 1) bytes (a value and an index each, and one row with k and whether the tensor was finite), which each
    replica receives from N - 1 others; 8 n bytes of memory.

    Lin et al., Deep Gradient Compression, 2018 (arXiv:1712.01887); there the ratio is 0.001, and the warmup four epochs
    from 0.25.
    """

    keeps_shapes = True  # the norm, k and the state are per variable
    remembers = True

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
        self._ratio, self._warmup_ratio = checked_ratio("dgc", ratio), checked_ratio("dgc", warmup_ratio)
        if not is_number(momentum) or not 0 <= momentum < 1:
            raise InputError(f"dgc needs a momentum in [0, 1). Received: {momentum!r}. Write, say, momentum=0.9.")
        if clip_norm is not None and (not is_number(clip_norm) or not 0 < clip_norm < math.inf):
            raise InputError(f"dgc needs a finite clip_norm above 0. Received: {clip_norm!r}. Leave it out for none.")
        checked_integer("dgc", "warmup_steps", warmup_steps, 0, 2**24)
        if warmup_steps and self._warmup_ratio < self._ratio:
            raise InputError(
                f"dgc's ratio falls from warmup_ratio. Received: {warmup_ratio=}, {ratio=}. Raise warmup_ratio."
            )
        self._momentum, self._warmup_steps = float(momentum), int(warmup_steps)
        self._clip_norm = None if clip_norm is None else float(clip_norm)

    def vector_state(self, spec: tf.TensorSpec) -> list[State]:
        """See base class: u, v and the number of steps so far."""
        return [
            State(f"{spec.name}/velocity", tuple(spec.shape), tf.float32, per_replica=True),
            State(f"{spec.name}/residual", tuple(spec.shape), tf.float32, per_replica=True),
            State(f"{spec.name}/steps", (), tf.int32, per_replica=False),
        ]

    def reduce_vector(
        self, x: tf.Tensor, state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> ReducedVector:
        """See base class. One message."""
        velocity, residual, steps = state
        velocity, grown = self._grow(x, velocity, residual, collectives.size)
        largest = self._largest(grown, seed_of(name, steps, collectives.rank), steps)
        # If k is static, so is the length of the message: the bytes sent are then known without a run.
        entries = largest if self._warmup_steps else padded(largest, count_kept(self._ratio, x.shape[0]))
        total, checks = exchange(*entries, finiteness_mark(largest.values), x.shape[0], collectives, name=name)
        velocity, residual = _masked(velocity, largest.indices), _masked(grown, largest.indices)
        unsent = [tf.reshape(new, old.shape) for new, old in zip((velocity, residual), state, strict=False)]
        return ReducedVector(total, grown - residual, [*unsent, steps + 1], checks)

    def _grow(
        self, x: tf.Tensor, velocity: tf.Tensor, residual: tf.Tensor, replicas: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the new velocity and residual, as vectors, before anything is sent."""
        if self._clip_norm is not None:
            x *= tf.minimum(1.0, self._clip_norm / math.sqrt(replicas) / tf.norm(x))
        velocity = self._momentum * tf.reshape(velocity, [-1]) + x
        return velocity, tf.reshape(residual, [-1]) + velocity

    def _largest(self, x: tf.Tensor, seed: tf.Tensor, steps: tf.Tensor) -> SparseVector:
        k: int | tf.Tensor = count_kept(self._ratio, x.shape[0])
        if self._warmup_steps:
            done = tf.minimum(tf.cast(steps, tf.float32) / self._warmup_steps, 1.0)
            ratio = self._warmup_ratio * tf.pow(self._ratio / self._warmup_ratio, done)
            warm = tf.maximum(tf.cast(tf.round(ratio * x.shape[0]), tf.int32), k)
            k = tf.where(steps < self._warmup_steps, warm, k)
        return largest_sampled(x, k, seed, sample_size(self._ratio))


def _masked(x: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_update(x, indices[:, None], tf.zeros_like(indices, tf.float32))
