"""Exchanges at regular intervals: local SGD, with or without an optimizer of the global weights."""

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import Reducer
from tfdist.grammar.sync import Averaging, Periodic
from tfdist.step.state_store import StateStore
from tfdist.step.validation import inner_optimizer
from tfdist.synchronization.exchange import Exchange, ExchangeResult, replica_mean
from tfdist.synchronization.global_weights import GlobalWeights
from tfdist.synchronization.interface import Exchanges
from tfdist.synchronization.resumed import check_resumed


class PeriodicExchanges(Exchanges):
    """Exchanges the weights every `period` steps; see `Exchange`."""

    has_local_weights = True

    def __init__(self, sync: Periodic, model: keras.Model, strategy: Strategy, reducer: Reducer, store: StateStore):
        """Creates the global weights.

        Args:
          sync: when and how to exchange; a subclass may need one of its own.
          model: compiled and built model.
          strategy: its strategy.
          reducer: sums changes of weights over replicas.
          store: store of the state.
        """
        self._sync, self._strategy = sync, strategy
        self._weights, optimizer = list(model.trainable_variables), inner_optimizer(model.optimizer)
        self._statistics = keras_internals.moving_statistics(model)
        self._global_weights = GlobalWeights(self._weights, strategy, sync.outer)
        self.variables = self._global_weights.variables
        self._exchange = self._make_exchange(self._weights, optimizer, strategy, reducer, self._global_weights, store)
        averages = [average for _, average in keras_internals.weight_averages(optimizer)]
        self._mean = replica_mean([*self._weights, *averages], strategy, self._rows)
        self._mean_in_agreement = replica_mean(averages, strategy, self._rows)
        self._compiled: Any = None
        self._batch_size = 0
        self._last: int | None = None  # step of the last exchange; None before local training begins

    def _make_exchange(self, *args: Any) -> Exchange:
        """Creates what happens in an exchange, from the positional arguments of `Exchange`."""
        state = self._sync.state if isinstance(self._sync, Averaging) else "local"
        return Exchange(*args, optimizer_state=state, statistics=self._statistics)

    def is_local_step(self, step: int) -> bool:
        """See base class."""
        return step >= self._sync.first_local_step

    def next(self, step: int) -> int | None:
        """See base class."""
        first, period = self._sync.first_local_step, self._sync.period
        return first if step < first else first + ((step - first) // period + 1) * period

    def begin(self, step: int, batch_size: int) -> None:
        """See base class; in agreement, replicas' weights are the global ones, even if the program has changed them."""
        self._batch_size = batch_size
        if self.is_local_step(step) and self._last in (None, step):
            self._last = step
            tf.function(self._take_over_global_weights, autograph=False).get_concrete_function()()

    def at(self, step: int) -> Mapping[str, float]:
        """See base class; returns `replica_divergence`."""
        if self.is_local_step(step) and self._last is None:
            self.begin(step, self._batch_size)
            return {}
        if not self.is_local_step(step) or self.next(step - 1) != step or self._last == step:
            return {}
        assert self._last is not None
        share = self._batch_size * (step - self._last) / self._strategy.replicas
        found = self._exchanged(tf.constant(share, keras.config.floatx()))
        self._last = step
        return {"replica_divergence": float(found.divergence)}

    def averaged(self, step: int) -> contextlib.AbstractContextManager[None]:
        """See base class; right after an exchange, only averages of weights may differ between replicas."""
        agree = self._last is None or self._last == step
        return self._mean_in_agreement() if agree else self._mean()

    def _rows(self) -> tf.Tensor:
        """Returns the number of rows since the last exchange."""
        return tf.convert_to_tensor(self._exchange.rows)

    def _take_over_global_weights(self) -> None:
        """Makes the weights of all replicas the global ones."""
        self._strategy.run(lambda: self._global_weights.take_over(self._weights))

    def _exchange_all(self, rows: tf.Tensor) -> Any:
        """Exchanges the weights of all replicas, each of which has trained on this many rows."""
        return self._strategy.run(self._exchange.exchange, rows)

    @property
    def payload_per_step(self) -> float:
        """See base class; an exchange's payload divided by the period."""
        recording = self._exchange.recording
        return recording.payload_bytes / self._sync.period if recording else 0

    def to_json(self) -> dict[str, Any]:
        """See base class."""
        return {"last_exchange": self._last}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """See base class.

        Raises:
          InputError: the run exchanged fragments, with a delay or with a center, or trained locally in a step of the warmup.
        """
        check_resumed(self._sync, saved, step, is_like_ours=self._continues(saved))
        self._last = saved.get("last_exchange")

    def _continues(self, saved: Mapping[str, Any]) -> bool:
        """Returns whether an exchange left the replicas of a run with the global weights; see `to_json`."""
        return not saved.get("since") and not saved.get("center")

    def _exchanged(self, share: tf.Tensor) -> ExchangeResult:
        """Exchanges the weights; the first time, processes compare the calls that they will make."""
        if self._compiled is None:
            self._compiled = tf.function(self._exchange_all, autograph=False).get_concrete_function(
                tf.TensorSpec([], share.dtype)
            )
            assert self._exchange.recording is not None
            agree_on_plan(self._strategy.peers, self._exchange.recording.calls)
        found = self._compiled(share)
        return ExchangeResult(*(self._strategy.local(value)[0] for value in found))
