"""Local SGD with a period that a rule changes at exchanges: `adaptive`."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.distribution.strategy import HasCollectives
from tfdist.gradients import Reducer
from tfdist.grammar.sync import Adaptive
from tfdist.step.state_store import StateStore
from tfdist.synchronization.period_rules import RULES, AtExchange
from tfdist.synchronization.periodic import PeriodicExchanges


class AdaptiveExchanges(PeriodicExchanges):
    """Exchanges the mean of the weights, at the end of periods that a rule sets, the same on every process."""

    _sync: Adaptive

    def __init__(
        self, sync: Adaptive, model: keras.Model, strategy: HasCollectives, reducer: Reducer, store: StateStore
    ):
        """See base class."""
        super().__init__(sync, model, strategy, reducer, store)
        self._rule = RULES[sync.rule](sync)

    def begin(self, step: int, batch_size: int, rate: float = 1.0) -> None:
        """See base class."""
        is_first = self._last is None
        super().begin(step, batch_size, rate)
        if is_first:
            self._decide(step, None)

    def next(self, step: int) -> int | None:
        """See base class."""
        return step + 1 if self._last is None else max(step + 1, self._last + self._period)

    def observe(self, losses: Sequence[float]) -> None:
        """See base class."""
        self._rule.observe(losses)

    def at(self, step: int) -> Mapping[str, float]:
        """See base class; the period that begins is recorded with `cost`."""
        found = super().at(step)
        if "replica_divergence" in found:
            self._decide(step, found["replica_divergence"])
        return found

    @property
    def _period(self) -> int:
        """See base class."""
        return self._rule.period

    def cost(self, exact_bytes: int) -> dict[str, float]:
        """See base class; with `sync_period`, the period in force."""
        return {**super().cost(exact_bytes), "sync_period": self._period}

    def to_json(self) -> dict[str, Any]:
        """See base class."""
        return {**super().to_json(), "rule": self._rule.to_json()}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """See base class."""
        super().restore(saved, step)
        self._rule = RULES[self._sync.rule](self._sync)
        self._rule.restore(saved.get("rule", {}))

    def _decide(self, step: int, divergence: float | None) -> None:
        # Ranks of different hardware may compute another divergence, in its last bits.
        mine = [*self._rates(), None if divergence is None else repr(divergence)]
        rate, after, agreed = self._strategy.group.broadcast("sync/period", mine, LONG_SECONDS)
        self._rule.decide(AtExchange(step, rate, after > rate, None if agreed is None else float(agreed)))

    def _rates(self) -> list[float]:
        """Returns the learning rates of the next step and the one after it, as far as known."""
        schedule = keras_internals.scheduled_learning_rate(self._optimizer)
        if schedule is None:
            return [self._rate * float(tf.convert_to_tensor(self._optimizer.learning_rate))] * 2
        done = int(tf.convert_to_tensor(self._optimizer.iterations))
        return [self._rate * float(schedule(tf.constant(done + i, tf.int64))) for i in range(2)]
