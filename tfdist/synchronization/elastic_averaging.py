"""Elastic averaging, synchronous (Zhang, Choromanska and LeCun 2015, arXiv:1412.6651): EASGD and EAMSGD.

With x the center and w_r the weights of replica r, an exchange computes, from the previous values of both,

    w_r' = w_r - alpha (w_r - x),        x' = x + alpha * sum over r of (w_r - x)

The weights and the center move towards each other, and each replica explores around it. With alpha = 0.9 / N, the default,
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

from tfdist.config.sync import EASGD
from tfdist.step.layer_state import TemporaryValues
from tfdist.synchronization.periodic import PeriodicSynchronizer
from tfdist.synchronization.weight_averaging import (
    Exchange,
    ExchangeResult,
    apply_constraints,
    read_variables,
    square_norm,
)


class ElasticExchange(Exchange):
    """Moves the center and the replicas towards each other. Neither differences nor `divergence` are weighted by rows."""

    def __init__(self, *args: Any, alpha: float):
        super().__init__(*args)
        self._alpha = alpha

    def _summands(self, weights: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """See base class. Differences have equal weights."""
        changes = [x - w for x, w in zip(self.global_weights.values(), weights, strict=True)]
        return [*changes, rows, square_norm(changes)]

    def _update(self, totals: Sequence[tf.Tensor]) -> ExchangeResult:
        *totals, rows, squares = totals
        replicas, center = self._strategy.replicas, self.global_weights.values()
        new_center = [x - self._alpha * total for x, total in zip(center, totals, strict=True)]
        self.global_weights.assign(apply_constraints(self.weights, new_center))
        change = [total / replicas for total in totals]
        mean = [x - difference for x, difference in zip(center, change, strict=True)]
        spread = tf.maximum(squares / replicas - square_norm(change), 0)
        return ExchangeResult(tf.sqrt(spread) / tf.sqrt(square_norm(mean)), rows)

    def _new_weights(self, changes: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        pairs = zip(read_variables(self.weights), changes, strict=True)
        return apply_constraints(self.weights, [w + self._alpha * change for w, change in pairs])


class ElasticSynchronizer(PeriodicSynchronizer):
    """Elastic averaging; the center is evaluated and exported, even right after an exchange.

    Before the first local step, the center is initialized with the model's weights.
    """

    _sync: EASGD

    def _make_exchanges(self, model: keras.Model) -> Sequence[Exchange]:
        alpha = self._sync.effective_alpha(self._strategy.replicas)
        exchange = ElasticExchange(
            model.trainable_variables, self._strategy, self._create_reducer, self._store, alpha=alpha
        )
        self._center = TemporaryValues(exchange.weights, self._strategy, lambda _: exchange.global_weights.values())
        return [exchange]

    def begin(self, step: int, batch_size: int) -> None:
        self._sync.check_alpha(self._strategy.replicas)
        if self._last_exchange is None:
            super().begin(step, batch_size)
        self._batch_size = batch_size

    def with_global_weights(self, step: int) -> contextlib.AbstractContextManager[None]:
        """See base class. Before the first step, the weights of all replicas equal the center."""
        return contextlib.nullcontext() if self._last_exchange is None else self._center()

    def to_json(self) -> dict[str, Any]:
        """See base class. `center` indicates that the global weights are evaluated, not the mean over replicas."""
        return {**super().to_json(), "center": True}

    def _can_resume(self, saved: Mapping[str, Any]) -> bool:
        """See base class. Replicas need not have the global weights."""
        return not saved.get("since")
