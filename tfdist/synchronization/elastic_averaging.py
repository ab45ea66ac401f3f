"""Elastic averaging, synchronous (Zhang, Choromanska and LeCun 2015, arXiv:1412.6651): EASGD and EAMSGD.

With x the center and w_r the weights of replica r, an exchange computes, from the old values on both sides,

    w_r' = w_r - alpha (w_r - x),        x' = x + alpha * sum over r of (w_r - x)

Replicas and center move towards each other, and each replica explores around the center. With alpha = 0.9 / N, the default,
the center moves 0.9 of its distance to the mean. Local steps use the replica's optimizer: with plain SGD this is EASGD, with
Nesterov momentum EAMSGD. As in the paper, differences are not weighted by rows, and an exchange preserves the sum of the
center and all replicas.

A reducer sums the differences. If it is lossy, a replica moves by its exact difference and the center by the sum of what was
sent. Error feedback then preserves, up to rounding, the sum of the center, all replicas and alpha times the unsent part: no
difference is lost, only delayed. An unbiased method without error feedback, such as int8, preserves the sum in expectation.

Cost of an exchange: the message of `Exchange`, at most the bytes of one step with summed gradients. Memory: one variable per
trainable variable.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.config.sync import EASGD
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import Reducer
from tfdist.step.layer_state import TemporaryValues
from tfdist.step.state_store import StateStore
from tfdist.synchronization.exchange import Exchange, ExchangeResult, apply_constraints, square_norm
from tfdist.synchronization.periodic import PeriodicSynchronizer

_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}  # by size of a floating-point number in bytes


class ElasticExchange(Exchange):
    """Moves center and replicas towards each other. Neither differences nor `divergence` are weighted by rows."""

    def __init__(self, *args: Any, alpha: float):
        super().__init__(*args)
        self._alpha = alpha

    def _message(self, weights: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """See base class. Differences have equal weights."""
        changes = [x - w for x, w in zip(self._global_weights.values(), weights, strict=True)]
        return [*changes, rows, square_norm(changes)]

    def _update(
        self, weights: Sequence[tf.Tensor], totals: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], ExchangeResult]:
        """See base class."""
        *totals, rows, squares = totals
        replicas, center = self._strategy.replicas, self._global_weights.values()
        new_weights = apply_constraints(
            self._weights, [w + self._alpha * (x - w) for x, w in zip(center, weights, strict=True)]
        )
        new_center = [x - self._alpha * total for x, total in zip(center, totals, strict=True)]
        self._global_weights.assign(apply_constraints(self._weights, new_center))
        change = [total / replicas for total in totals]
        mean = [x - difference for x, difference in zip(center, change, strict=True)]
        spread = tf.maximum(squares / replicas - square_norm(change), 0)
        return new_weights, ExchangeResult(tf.sqrt(spread) / tf.sqrt(square_norm(mean)), rows)


class ElasticSynchronizer(PeriodicSynchronizer):
    """Elastic averaging; the center is evaluated and exported, also right after an exchange.

    If all replicas have bitwise equal weights, either the program assigned them or no replica has trained yet: these weights
    are then also the center. With a single replica, weights become the center only before the first step.
    """

    _sync: EASGD

    def __init__(self, sync: EASGD, model: keras.Model, strategy: Strategy, reducer: Reducer, store: StateStore):
        super().__init__(sync, model, strategy, reducer, store)
        self._center = TemporaryValues(self._weights, strategy, self._center_of)
        self._compiled_assign_center = strategy.compiled(lambda: strategy.run(self._assign_center))

    def _make_exchange(self, *args: Any) -> Exchange:
        """See base class."""
        return ElasticExchange(*args, alpha=self._sync.effective_alpha(self._strategy.replicas))

    def begin(self, step: int, batch_size: int) -> None:
        """See base class."""
        self._sync.check_alpha(self._strategy.replicas)
        if self._last_exchange is None:
            super().begin(step, batch_size)
            return
        self._batch_size = batch_size
        self._compiled_assign_center()

    def with_global_weights(self, step: int) -> contextlib.AbstractContextManager[None]:
        """See base class. Before the first step, all replicas have the center."""
        return contextlib.nullcontext() if self._last_exchange is None else self._center()

    def _center_of(self, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the center, or the replicas' weights if they are all equal. A replica function."""
        are_equal = replicas_agree(weights, self._strategy.collectives)
        return [tf.where(are_equal, w, x) for w, x in zip(weights, self._global_weights.values(), strict=True)]

    def _assign_center(self) -> tf.Tensor:
        """Assigns the weights to the center if they are equal on all replicas. A replica function."""
        self._global_weights.assign(self._center_of(self._exchange.local_weights()))
        return tf.constant(True)

    def to_json(self) -> dict[str, Any]:
        """See base class. `center` tells that the global weights are evaluated, not the mean over replicas."""
        return {**super().to_json(), "center": True}

    def _can_resume(self, saved: Mapping[str, Any]) -> bool:
        """See base class. Replicas need not have the global weights."""
        return not saved.get("since")


def replicas_agree(tensors: Sequence[tf.Tensor], collectives: Collectives) -> tf.Tensor:
    """Returns whether several replicas have bitwise equal tensors, from a fingerprint. In a replica function."""
    if collectives.size == 1:
        return tf.constant(False)
    total = tf.zeros([], tf.int64)
    for tensor in tensors:
        bits = tf.cast(tf.reshape(tf.bitcast(tensor, _INTEGERS[tensor.dtype.size]), [-1]), tf.int64)
        multipliers = 2 * tf.range(tf.size(bits, tf.int64)) + 1
        total = total * 1_000_003 + tf.reduce_sum(
            bits * multipliers
        )  # integers wrap, so the order of summation does not matter
    parts = [tf.math.floormod(total, 2**24), tf.math.floormod(total // 2**24, 2**24)]
    fingerprint = tf.cast(tf.stack(parts), tf.float32)  # exactly
    [maximum, minimum] = collectives.all_reduce([fingerprint, -fingerprint], "max", name="elastic/agreement")
    return tf.reduce_all(tf.equal(maximum, -minimum))
