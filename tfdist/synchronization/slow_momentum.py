"""Slow momentum (Wang, Tantia, Ballas and Rabbat 2020, arXiv:1910.00643): `slowmo`.

With x the global weights, m the mean of the replicas' weights, weighted by their rows, u the slow momentum, beta its
factor, alpha the slow learning rate, and gamma the learning rate of the replicas' last step, an exchange computes

    u' = beta u + (x - m) / gamma,        x' = x - alpha gamma u',        w_r = x'

u is in units of gradients, so that it keeps its meaning when a schedule or a callback changes gamma: what is left of it is
applied with the new rate. x' is computed as x - alpha (gamma beta u + (x - m)), which also holds for gamma = 0; such an
exchange adds nothing to u.

Cost: the message of `Exchange`, in bytes that of one step with summed gradients. Memory: two variables per trainable
variable.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.distribution.strategy import HasCollectives
from tfdist.grammar.sync import SlowMo
from tfdist.synchronization.exchange import ExchangeResult
from tfdist.synchronization.global_weights import GlobalWeights
from tfdist.synchronization.periodic import PeriodicExchanges


class SlowMomentum(GlobalWeights):
    """Global weights with slow momentum.

    Attributes:
      gamma: scalar; learning rate of the replicas' last step, to be assigned before an exchange.
    """

    def __init__(self, weights: Sequence[keras.Variable], strategy: HasCollectives, sync: SlowMo):
        """Creates the variables; arguments as of the base class."""
        super().__init__(weights, strategy, "")
        self._sync = sync
        with strategy.scope():
            self._momenta = [
                keras.Variable("zeros", shape=x.shape, dtype=x.dtype, trainable=False, name=f"slow_momentum_{x.name}")
                for x in self.copies
            ]
        self.variables = [*self.copies, *self._momenta]
        self.gamma = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="slow_momentum/gamma")

    def _update(self, changes: Sequence[tf.Tensor]) -> None:
        """See base class."""
        for copy, momentum, change in zip(self.copies, self._momenta, changes, strict=True):
            gamma = tf.cast(self.gamma, change.dtype)
            decayed = self._sync.momentum * tf.convert_to_tensor(momentum.value)
            copy.assign(tf.convert_to_tensor(copy.value) - self._sync.learning_rate * (gamma * decayed + change))
            momentum.assign(decayed + tf.math.divide_no_nan(change, gamma))


class SlowMomentumExchanges(PeriodicExchanges):
    """Exchanges that update the global weights with slow momentum."""

    _sync: SlowMo
    _global_weights: SlowMomentum

    def _make_global_weights(self, weights: Sequence[keras.Variable]) -> GlobalWeights:
        """See base class."""
        return SlowMomentum(weights, self._strategy, self._sync)

    def _exchanged(self, share: tf.Tensor) -> ExchangeResult:
        """See base class."""
        self._global_weights.gamma.assign(self._rate * agreed_learning_rate(self._optimizer, self._strategy))
        return super()._exchanged(share)


def agreed_learning_rate(optimizer: keras.Optimizer, strategy: HasCollectives) -> float:
    """Returns the learning rate of the last update on rank 0; every process must call it.

    The others' may differ under a schedule, as a replica that skips a step does not count it.
    """
    own = keras_internals.last_learning_rate(optimizer)
    return float(strategy.group.broadcast("sync/learning_rate", own, LONG_SECONDS))
