"""Elastic averaging, synchronous (Zhang, Choromanska and LeCun 2015, arXiv:1412.6651): EASGD and EAMSGD.

With x the center and w_r the weights of replica r, an exchange computes, from the old values on both sides,

    w_r' = w_r - alpha (w_r - x),        x' = x + alpha * sum over r of (w_r - x)

so that replicas and center move towards each other, and each replica explores around the center. With alpha = 0.9 / N, the
default, the center moves 0.9 of its distance to the mean. What a replica does in its own steps is its optimizer's:
plain SGD makes it EASGD, Nesterov momentum EAMSGD. Rows do not weight the differences, as in the paper: what the center
receives from a replica is what the replica gives, so that an exchange keeps the sum of the center and all replicas.

The differences are summed by a reducer. If it is lossy, a replica moves by its own exact difference and the center by the
sum of what was sent. Error feedback then keeps, up to rounding, the sum of the center, all replicas and alpha times what
has not been sent yet: no difference is lost, the center only receives it later. An unbiased method without error feedback,
such as int8, keeps the sum in expectation.

Cost of an exchange: the same message as of `Exchange`, in bytes at most that of one step with summed gradients. Memory:
one variable per trainable variable.
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
from tfdist.synchronization.exchange import Exchange, ExchangeResult, constrained, square_norm
from tfdist.synchronization.periodic import PeriodicSynchronizer

_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}  # by bytes of a floating-point number


class ElasticExchange(Exchange):
    """Moves center and replicas towards each other. `divergence` does not weight replicas by their rows either."""

    def __init__(self, *args: Any, alpha: float):
        """Initializes the exchange; see base class and `EASGD`."""
        super().__init__(*args)
        self._alpha = alpha

    def _message(self, own: Sequence[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """See base class; differences have equal weights."""
        changes = [x - w for x, w in zip(self._global_weights.values(), own, strict=True)]
        return [*changes, rows, square_norm(changes)]

    def _updated(self, own: Sequence[tf.Tensor], totals: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], ExchangeResult]:
        """See base class."""
        *totals, rows, squares = totals
        replicas, center = self._strategy.replicas, self._global_weights.values()
        moved = constrained(self._weights, [w + self._alpha * (x - w) for x, w in zip(center, own, strict=True)])
        attracted = [x - self._alpha * total for x, total in zip(center, totals, strict=True)]
        self._global_weights.assign(constrained(self._weights, attracted))
        change = [total / replicas for total in totals]
        mean = [x - difference for x, difference in zip(center, change, strict=True)]
        spread = tf.maximum(squares / replicas - square_norm(change), 0)
        return moved, ExchangeResult(tf.sqrt(spread) / tf.sqrt(square_norm(mean)), rows)


class ElasticSynchronizer(PeriodicSynchronizer):
    """Elastic averaging; the center is evaluated and exported, also right after an exchange.

    Replicas never agree on their own. If all have equal weights, bit for bit, then the program has set them, or none has
    trained yet: these weights are then the center, too. One replica always agrees with itself, which says nothing:
    with it, weights become the center only before the first step.
    """

    _sync: EASGD

    def __init__(self, sync: EASGD, model: keras.Model, strategy: Strategy, reducer: Reducer, store: StateStore):
        """See base class."""
        super().__init__(sync, model, strategy, reducer, store)
        self._center = TemporaryValues(self._weights, strategy, self._center_of)
        self._compiled_assign_center = strategy.compiled(lambda: strategy.run(self._assign_center))

    def _make_exchange(self, *args: Any) -> Exchange:
        """See base class."""
        return ElasticExchange(*args, alpha=self._sync.effective_alpha(self._strategy.replicas))

    def begin(self, step: int, batch_size: int) -> None:
        """See base class."""
        self._sync.check_alpha(self._strategy.replicas)
        if self._last is None:
            super().begin(step, batch_size)
            return
        self._batch_size = batch_size
        self._compiled_assign_center()

    def averaged(self, step: int) -> contextlib.AbstractContextManager[None]:
        """See base class; before the first step, all replicas have the center."""
        return contextlib.nullcontext() if self._last is None else self._center()

    def _center_of(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the center: the replicas' weights if all have equal ones. A replica function."""
        agree = in_agreement(own, self._strategy.collectives)
        return [tf.where(agree, w, x) for w, x in zip(own, self._global_weights.values(), strict=True)]

    def _assign_center(self) -> tf.Tensor:
        """Assigns the weights to the center if all replicas have equal ones. A replica function."""
        self._global_weights.assign(self._center_of(self._exchange.local_weights()))
        return tf.constant(True)

    def to_json(self) -> dict[str, Any]:
        """See base class; `center`: the global weights are evaluated, instead of the mean of the replicas' weights."""
        return {**super().to_json(), "center": True}

    def _can_resume(self, saved: Mapping[str, Any]) -> bool:
        """See base class; here, replicas need not have the global weights."""
        return not saved.get("since")


def in_agreement(tensors: Sequence[tf.Tensor], collectives: Collectives) -> tf.Tensor:
    """Returns whether several replicas have equal tensors, by a fingerprint of their bits. In a replica function."""
    if collectives.size == 1:
        return tf.constant(False)
    total = tf.zeros([], tf.int64)
    for tensor in tensors:
        bits = tf.cast(tf.reshape(tf.bitcast(tensor, _INTEGERS[tensor.dtype.size]), [-1]), tf.int64)
        odd = 2 * tf.range(tf.size(bits, tf.int64)) + 1
        total = total * 1_000_003 + tf.reduce_sum(bits * odd)  # integers wrap, so that their order does not matter
    parts = [tf.math.floormod(total, 2**24), tf.math.floormod(total // 2**24, 2**24)]
    own = tf.cast(tf.stack(parts), tf.float32)  # exactly
    [maximum, minimum] = collectives.all_reduce([own, -own], "max", name="elastic/agreement")
    return tf.reduce_all(tf.equal(maximum, -minimum))
