"""Exchanges at regular intervals: local SGD, with or without an outer optimizer, over all replicas or in groups."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.config.sync import Averaging, HierarchicalLocalSGD, Periodic
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError
from tfdist.gradients import Reducer
from tfdist.step.state_store import StateStore
from tfdist.step.validation import inner_optimizer
from tfdist.synchronization.exchange import (
    Exchange,
    ExchangeResult,
    GlobalWeights,
    apply_constraints,
    message_of,
    replica_mean,
    tensor_specs,
)
from tfdist.synchronization.interface import WeightSynchronizer


def check_resumable(sync: Periodic, saved: Mapping[str, Any], step: int, *, is_compatible: bool) -> None:
    """Checks that replicas that have trained locally can continue with a synchronization method.

    Their weights differ from each other and from the global weights in a way that depends on the method: another method
    would assume that they are equal, or lose the result of a pending exchange.

    Args:
      sync: synchronization of the resumed run.
      saved: result of `WeightSynchronizer.to_json`; empty for an unknown run.
      step: number of updates done.
      is_compatible: whether the method can continue from `saved` if replicas train locally in the next step.

    Raises:
      InputError: the method cannot continue the run.
    """
    have_trained_locally = saved.get("last_exchange") is not None or bool(saved.get("since"))
    if not have_trained_locally or (is_compatible and step >= sync.first_local_step):
        return
    raise InputError(
        f"A run must resume with the same method of exchanging weights. Received: sync={sync} at step {step} of a run whose "
        "replicas train locally in another way. Use the `sync` of that run."
    )


class PeriodicSynchronizer(WeightSynchronizer):
    """Exchanges the weights every `period` steps; see `Exchange`."""

    has_local_weights = True

    def __init__(self, sync: Periodic, model: keras.Model, strategy: Strategy, reducer: Reducer, store: StateStore):
        self._sync, self._strategy = sync, strategy
        self._weights, optimizer = list(model.trainable_variables), inner_optimizer(model.optimizer)
        self._statistics = keras_internals.moving_statistics(model)
        self._global_weights = GlobalWeights(self._weights, strategy, sync.outer)
        self.variables = self._global_weights.variables
        self._exchange = self._make_exchange(self._weights, optimizer, strategy, reducer, self._global_weights, store)
        averages = [average for _, average in keras_internals.weight_averages(optimizer)]
        self._mean = replica_mean([*self._weights, *averages], strategy, self._rows)
        self._averages_mean = replica_mean(averages, strategy, self._rows)
        self._compiled_exchange: Any = None
        self._batch_size = 0
        self._last_exchange: int | None = None  # step of the last exchange; None before local training begins

    def _make_exchange(self, *args: Any) -> Exchange:
        """Creates the exchange from the positional arguments of `Exchange`."""
        state = self._sync.state if isinstance(self._sync, Averaging) else "local"
        return Exchange(*args, optimizer_state=state, statistics=self._statistics)

    def is_local_step(self, step: int) -> bool:
        return step >= self._sync.first_local_step

    def next(self, step: int) -> int | None:
        first, period = self._sync.first_local_step, self._sync.period
        return first if step < first else first + ((step - first) // period + 1) * period

    def begin(self, step: int, batch_size: int) -> None:
        """See base class. After an exchange, the replicas' weights are global, even if the program has changed them."""
        self._batch_size = batch_size
        if self.is_local_step(step) and self._last_exchange in (None, step):
            self._last_exchange = step
            tf.function(self._take_over_global_weights, autograph=False).get_concrete_function()()

    def run_exchanges(self, step: int) -> Mapping[str, float]:
        """See base class. Returns `replica_divergence`."""
        if self.is_local_step(step) and self._last_exchange is None:
            self.begin(step, self._batch_size)
            return {}
        if not self.is_local_step(step) or self.next(step - 1) != step or self._last_exchange == step:
            return {}
        assert self._last_exchange is not None
        share = self._batch_size * (step - self._last_exchange) / self._strategy.replicas
        result = self._run_exchange(tf.constant(share, keras.config.floatx()))
        self._last_exchange = step
        return {"replica_divergence": float(result.divergence)}

    def with_global_weights(self, step: int) -> contextlib.AbstractContextManager[None]:
        """See base class. Right after an exchange, only averages of weights may differ between replicas."""
        weights_agree = self._last_exchange is None or self._last_exchange == step
        return self._averages_mean() if weights_agree else self._mean()

    def _rows(self) -> tf.Tensor:
        """Returns the number of rows since the last exchange."""
        return tf.convert_to_tensor(self._exchange.rows)

    def _take_over_global_weights(self) -> None:
        """Assigns the weights, which are equal on all replicas, to the global weights."""
        self._strategy.run(lambda: self._global_weights.take_weights(self._weights))

    def _exchange_all(self, rows: tf.Tensor) -> Any:
        """Exchanges the weights of all replicas; `rows` is the expected number of rows per replica."""
        return self._strategy.run(self._exchange.exchange, rows)

    @property
    def payload_per_step(self) -> float:
        """See base class. This is the payload of an exchange divided by the period."""
        recording = self._exchange.recording
        return recording.payload_bytes / self._sync.period if recording else 0

    def to_json(self) -> dict[str, Any]:
        return {"last_exchange": self._last_exchange}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """See base class.

        Raises:
          InputError: the run exchanged fragments, used a delay or a center, or trained locally during the warmup.
        """
        check_resumable(self._sync, saved, step, is_compatible=self._can_resume(saved))
        self._last_exchange = saved.get("last_exchange")

    def _can_resume(self, saved: Mapping[str, Any]) -> bool:
        """Returns whether an exchange left the replicas of a run with the global weights; see `to_json`."""
        return not saved.get("since") and not saved.get("center")

    def _run_exchange(self, share: tf.Tensor) -> ExchangeResult:
        """Exchanges the weights. Processes compare their calls the first time."""
        if self._compiled_exchange is None:
            self._compiled_exchange = tf.function(self._exchange_all, autograph=False).get_concrete_function(
                tf.TensorSpec([], share.dtype)
            )
            assert self._exchange.recording is not None
            agree_on_plan(self._strategy.peers, self._exchange.recording.calls)
        result = self._compiled_exchange(share)
        return ExchangeResult(*(self._strategy.local(value)[0] for value in result))


class HierarchicalSynchronizer(PeriodicSynchronizer):
    """Exchanges weights on several levels. At each step, only the due exchange with the largest groups takes place.

    In an exchange of a group G, w_r' = sum over s in G of n_s w_s / sum over s in G of n_s, with n_s the rows of replica s
    since the last exchange of that level. Only the last level changes the global weights. Cost: an all-reduce of P + 2
    numbers inside each group. Error feedback sends the error of an exchange in the next one, of any level.
    """

    def __init__(
        self,
        sync: HierarchicalLocalSGD,
        model: keras.Model,
        strategy: Strategy,
        reducer: Reducer,
        store: StateStore,
    ):
        """Creates the global weights.

        Raises:
          InputError: the replicas cannot be divided into groups of these sizes, or the reducer has a state that must be equal
            on all replicas, which groups do not guarantee.
        """
        sync.groups(strategy.replicas)
        reducer_states = reducer.state(tensor_specs(model.trainable_variables))
        if any(state.dtype.is_floating and not state.per_replica for state in reducer_states):
            raise InputError(
                f"Groups of replicas compress separately, but powersgd needs equal factors on all. Received: sync={sync}. "
                "Choose another compression, or local_sgd."
            )
        super().__init__(sync, model, strategy, reducer, store)
        self._levels = list(zip(sync.periods, sync.group_sizes, strict=False))
        states = [State(f"exchange/rows_before/{size}", (), tf.float64, per_replica=True) for size in sync.group_sizes]
        self._level_rows = store.variables(states)
        self._compiled_levels: dict[int | None, Any] = {}

    def next(self, step: int) -> int | None:
        [(period, _), *_] = self._levels
        return (step // period + 1) * period

    def run_exchanges(self, step: int) -> Mapping[str, float]:
        has_replicas = self._strategy.replicas > 1
        due_levels = [level for level, (period, _) in enumerate(self._levels) if has_replicas and step % period == 0]
        if step % self._sync.period and due_levels and self._last_exchange is not None:
            period, _ = self._levels[due_levels[-1]]
            share = self._batch_size * period / self._strategy.replicas
            self._exchange_of_level(due_levels[-1])(tf.constant(share, keras.config.floatx()))
            return {}
        fields = super().run_exchanges(step)
        if self._last_exchange == step:
            self._exchange_of_level(None)(tf.constant(0, keras.config.floatx()))
        return fields

    @property
    def payload_per_step(self) -> float:
        """See base class. This is the payload of an exchange of any level, divided by the shortest period."""
        [(period, _), *_] = self._levels
        return super().payload_per_step * self._sync.period / period

    def _exchange_of_level(self, level: int | None) -> Any:
        """Returns the compiled exchange of a level; for None, the function to call after an exchange of all replicas."""
        if level not in self._compiled_levels:
            function = self._begin_levels if level is None else functools.partial(self._exchange_group, level)

            def run(share: tf.Tensor) -> Any:
                return self._strategy.run(function, share)

            spec = tf.TensorSpec([], keras.config.floatx())
            self._compiled_levels[level] = tf.function(run, autograph=False).get_concrete_function(spec)
        return self._compiled_levels[level]

    def _begin_levels(self, share: tf.Tensor) -> None:
        """Starts counting the rows of all levels. A replica function."""
        for variable in self._level_rows:
            variable.assign(self._exchange.rows)

    def _exchange_group(self, level: int, share: tf.Tensor) -> None:
        """Replaces the weights by their mean over this replica's group. A replica function.

        Args:
          level: index of the level.
          share: scalar of dtype floatx; rows since the level's last exchange of a replica with an equal share.
        """
        _, size = self._levels[level]
        collectives = self._strategy.collectives
        first_rank = collectives.static_rank // size * size
        group = collectives.group(range(first_rank, first_rank + size))
        exchange = self._exchange
        rows = tf.cast(tf.convert_to_tensor(exchange.rows) - self._level_rows[level], share.dtype) / share
        global_weights, local_weights = self._global_weights.values(), exchange.local_weights()
        reduction = exchange.reduction.reduce(
            message_of(global_weights, local_weights, rows), group, name=f"exchange/level{level}"
        )
        *changes, all_rows, _ = reduction.totals
        means = [
            tf.where(all_rows > 0, x - tf.math.divide_no_nan(d, tf.cast(all_rows, d.dtype)), w)  # all may have skipped
            for x, d, w in zip(global_weights, changes, local_weights, strict=True)
        ]
        exchange.assign(
            apply_constraints(self._weights, means), exchange.new_state(rows, all_rows, group), reduction.state
        )
        for variable in self._level_rows[: level + 1]:
            variable.assign(exchange.rows)
