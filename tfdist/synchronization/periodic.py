"""Exchanges at regular intervals: local SGD, with or without an outer optimizer, over all replicas or in groups."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.config.sync import Averaging, HierarchicalLocalSGD, Periodic
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError
from tfdist.step.state_store import StateStore
from tfdist.step.validation import inner_optimizer
from tfdist.synchronization.interface import WeightSynchronizer
from tfdist.synchronization.weight_averaging import (
    CreateReducer,
    Exchange,
    ExchangeResult,
    apply_constraints,
    read_variables,
    replica_mean,
    summands_of,
    tensor_specs,
)


class PeriodicSynchronizer(WeightSynchronizer):
    """Exchanges all weights every `period` steps; see `Exchange`."""

    has_local_weights = True

    def __init__(
        self, sync: Periodic, model: keras.Model, strategy: Strategy, create_reducer: CreateReducer, store: StateStore
    ):
        self._sync, self._strategy, self._create_reducer, self._store = sync, strategy, create_reducer, store
        self._optimizer = inner_optimizer(model.optimizer)
        averages = {id(v): average for v, average in keras_internals.weight_averages(self._optimizer)}
        self._exchanges = self._make_exchanges(model)
        self.variables = [v for exchange in self._exchanges for v in exchange.global_weights.variables]
        self.own_variables = [v for exchange in self._exchanges for v in exchange.own_variables]
        self._means = [
            replica_mean([*e.weights, *(averages[id(v)] for v in e.weights if id(v) in averages)], strategy, e.rows)
            for e in self._exchanges
        ]
        self._averages_mean = replica_mean(list(averages.values()), strategy, self._exchanges[0].rows)
        self._compiled_functions: dict[Callable[..., Any], Any] = {}
        self._batch_size = 0
        self._last_exchange: int | None = None  # step of the last exchange; None before local training begins

    def _make_exchanges(self, model: keras.Model) -> Sequence[Exchange]:
        sync, weights, statistics = self._sync, model.trainable_variables, keras_internals.moving_statistics(model)
        state = sync.state if isinstance(sync, Averaging) else "local"
        options = {"optimizer": self._optimizer, "optimizer_state": state, "statistics": statistics}
        return [Exchange(weights, self._strategy, self._create_reducer, self._store, sync.outer, **options)]

    def is_local_step(self, step: int) -> bool:
        return step >= self._sync.first_local_step

    def next_step(self, step: int) -> int | None:
        first, period = self._sync.first_local_step, self._sync.period
        return first if step < first else first + ((step - first) // period + 1) * period

    def begin(self, step: int, batch_size: int) -> None:
        """See base class. After an exchange, the replicas' weights are global, even if the program has changed them."""
        self._batch_size = batch_size
        if self.is_local_step(step) and self._last_exchange in (None, step):
            self._last_exchange = step
            self._take_over_weights()

    def _take_over_weights(self) -> None:
        """Assigns the weights, which are equal on all replicas, to the global weights."""
        for exchange in self._exchanges:
            self._on_replicas(exchange.take_weights)

    def run_exchanges(self, step: int) -> Mapping[str, float]:
        """See base class. Returns `replica_divergence`."""
        if self.is_local_step(step) and self._last_exchange is None:
            self.begin(step, self._batch_size)
            return {}
        if not self.is_local_step(step) or self.next_step(step - 1) != step or self._last_exchange == step:
            return {}
        assert self._last_exchange is not None
        [exchange], rows = self._exchanges, self._expected_rows(step - self._last_exchange)
        result = self._compiled_exchange(exchange, exchange.run, rows)(rows)
        self._last_exchange = step
        return {"replica_divergence": self._divergence(result)}

    def with_global_weights(self, step: int) -> contextlib.AbstractContextManager[None]:
        """See base class. Right after an exchange, only averages of weights may differ between replicas."""
        weights_agree = self._last_exchange is None or self._last_exchange == step
        return self._averages_mean() if weights_agree else self._means[0]()

    @property
    def payload_per_step(self) -> float:
        """See base class. This is the payload of an exchange of all weights divided by the period."""
        recordings = [exchange.recording for exchange in self._exchanges if exchange.recording]
        if len(recordings) < len(self._exchanges):
            return 0
        return sum(recording.payload_bytes for recording in recordings) / self._sync.period

    def to_json(self) -> dict[str, Any]:
        return {"last_exchange": self._last_exchange}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """See base class.

        Raises:
          InputError: replicas have trained locally with another method, or in steps that belong to the warmup of this one.
            Their weights then differ from the global weights in a way that this method does not continue.
        """
        have_trained_locally = saved.get("last_exchange") is not None or bool(saved.get("since"))
        if have_trained_locally and not (self._can_resume(saved) and self.is_local_step(step)):
            raise InputError(
                f"A run must resume with the `sync` method with which it was saved. Received: sync={self._sync} at step {step} "
                "of a run whose replicas train locally in another way. Use the same `sync` as that run."
            )
        self._last_exchange = saved.get("last_exchange")

    def _can_resume(self, saved: Mapping[str, Any]) -> bool:
        """Returns whether the method can continue from a result of `to_json` if replicas train locally in the next step."""
        return not saved.get("since") and not saved.get("center")

    def _expected_rows(self, steps: int) -> tf.Tensor:
        """Returns the rows of each replica in a number of steps if all have equally many, a scalar of dtype floatx."""
        return tf.constant(self._batch_size * steps / self._strategy.replicas, keras.config.floatx())

    def _divergence(self, result: ExchangeResult) -> float:
        return float(self._strategy.local(result.divergence)[0])

    def _compiled_exchange(self, exchange: Exchange, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Same as `_compiled_for`, but processes also compare their collective calls after the first trace."""
        is_first = exchange.recording is None
        compiled = self._compiled_for(function, *args, **options)
        if is_first:
            assert exchange.recording is not None
            agree_on_plan(self._strategy.peers, exchange.recording.calls)
        return compiled

    def _on_replicas(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._compiled_for(function, *args)(*args)

    def _compiled_for(
        self, function: Callable[..., Any], *args: Any, prologue: Callable[[], object] = lambda: None
    ) -> Any:
        """Returns a replica function compiled for arguments of these shapes. Compiles it once, in the main thread.

        `prologue` is called at the start of the trace, outside of replicas.
        """

        def run(*run_args: Any) -> Any:
            prologue()
            return self._strategy.run(function, *run_args)

        if function not in self._compiled_functions:
            self._compiled_functions[function] = tf.function(run, autograph=False).get_concrete_function(*args)
        return self._compiled_functions[function]


class HierarchicalSynchronizer(PeriodicSynchronizer):
    """Exchanges weights on several levels. At each step, only the due exchange with the largest groups takes place.

    In an exchange of a group G, w_r' = sum over s in G of n_s w_s / sum over s in G of n_s, with n_s the rows of replica s
    since the last exchange of that level. Only the last level changes the global weights. Cost: an all-reduce of P + 2
    numbers inside each group. Error feedback sends the error of an exchange in the next one, of any level.
    """

    _sync: HierarchicalLocalSGD

    def __init__(self, sync: HierarchicalLocalSGD, *args: Any):
        """Creates the global weights.

        Raises:
          InputError: the replicas cannot be divided into groups of these sizes, or the reducer has a state that must be equal
            on all replicas, which groups do not guarantee.
        """
        super().__init__(sync, *args)
        self._levels = list(zip(sync.periods, sync.group_sizes, strict=False))
        states = [State(f"exchange/rows_before/{size}", (), tf.float64, per_replica=True) for size in sync.group_sizes]
        self._level_rows = self._store.variables(states)
        self._exchanges_of_levels = [functools.partial(self._exchange_group, level) for level in range(len(states))]

    def _make_exchanges(self, model: keras.Model) -> Sequence[Exchange]:
        """See base class. First checks that the groups and the reducer are possible."""
        self._sync.groups(self._strategy.replicas)
        specs = tensor_specs(model.trainable_variables)
        reducer_states = self._create_reducer(specs).state(specs)
        if any(state.dtype.is_floating and not state.per_replica for state in reducer_states):
            raise InputError(
                "Groups of replicas compress separately, but powersgd needs equal factors on all. Received: "
                f"sync={self._sync}. Choose another compression, or local_sgd."
            )
        return super()._make_exchanges(model)

    def next_step(self, step: int) -> int | None:
        [(period, _), *_] = self._levels
        return (step // period + 1) * period

    def run_exchanges(self, step: int) -> Mapping[str, float]:
        has_replicas = self._strategy.replicas > 1
        due_levels = [level for level, (period, _) in enumerate(self._levels) if has_replicas and step % period == 0]
        if step % self._sync.period and due_levels and self._last_exchange is not None:
            period, _ = self._levels[due_levels[-1]]
            self._on_replicas(self._exchanges_of_levels[due_levels[-1]], self._expected_rows(period))
            return {}
        fields = super().run_exchanges(step)
        if self._last_exchange == step:
            self._on_replicas(self._begin_levels)
        return fields

    @property
    def payload_per_step(self) -> float:
        """See base class. This is the payload of an exchange of any level, divided by the shortest period."""
        [(period, _), *_] = self._levels
        return super().payload_per_step * self._sync.period / period

    def _begin_levels(self) -> None:
        """Starts counting the rows of all levels. A replica function."""
        for variable in self._level_rows:
            variable.assign(self._exchanges[0].all_rows)

    def _exchange_group(self, level: int, expected: tf.Tensor) -> None:
        """Replaces the weights by their mean over this replica's group in a level. A replica function.

        `expected` is a scalar of dtype floatx: rows since the level's last exchange if all replicas had equally many.
        """
        _, size = self._levels[level]
        collectives = self._strategy.collectives
        first_rank = collectives.static_rank // size * size
        group = collectives.group(range(first_rank, first_rank + size))
        [exchange] = self._exchanges
        rows = tf.cast(tf.convert_to_tensor(exchange.all_rows) - self._level_rows[level], expected.dtype) / expected
        global_weights, local_weights = exchange.global_weights.values(), read_variables(exchange.weights)
        reduction = exchange.reduction.reduce(
            summands_of(global_weights, local_weights, rows), group, name=f"exchange/level{level}"
        )
        *changes, all_rows, _ = reduction.totals
        means = [
            tf.where(all_rows > 0, x - tf.math.divide_no_nan(d, tf.cast(all_rows, d.dtype)), w)  # all may skip steps
            for x, d, w in zip(global_weights, changes, local_weights, strict=True)
        ]
        exchange.assign(apply_constraints(exchange.weights, means), exchange.new_state(rows, all_rows, group))
        exchange.reduction.assign(reduction.state)
        for variable in self._level_rows[: level + 1]:
            variable.assign(exchange.all_rows)
