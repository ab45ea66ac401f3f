"""Exchanges among groups of replicas, more often than among all: hierarchical local SGD."""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError
from tfdist.gradients import Reducer
from tfdist.grammar.sync import HierarchicalLocalSGD
from tfdist.step.state_store import StateStore
from tfdist.synchronization.exchange import message_of, specs_of
from tfdist.synchronization.global_weights import constrained
from tfdist.synchronization.periodic import PeriodicExchanges


class HierarchicalExchanges(PeriodicExchanges):
    """Exchanges of several levels: of those that are due at a step, only the one of the largest groups.

    In an exchange of a group G, w_r' = sum over s in G of n_s w_s / sum over s in G of n_s, with n_s the rows of replica s
    since the last exchange of that level; the global weights change with the last level only. Cost: an all-reduce of P + 2
    numbers inside each group. What a replica did not send in one exchange (error
    feedback) is sent in the next, of whatever level.
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

        Args:
          sync: when and how to exchange.
          model: compiled and built model.
          strategy: its strategy, created with the groups of `sync`.
          reducer: sums changes of weights over replicas.
          store: store of the state.

        Raises:
          InputError: the replicas cannot be divided into groups of these sizes, or the reducer has a state that must be equal
            on all replicas, which groups would make different.
        """
        sync.groups(strategy.replicas)
        compressed = reducer.state(specs_of(model.trainable_variables))
        if any(state.dtype.is_floating and not state.per_replica for state in compressed):
            raise InputError(
                f"Groups of replicas compress alone, but powersgd needs equal factors on all. Received: sync={sync}. Choose "
                "another compression, or local_sgd."
            )
        super().__init__(sync, model, strategy, reducer, store)
        self._levels = list(zip(sync.periods, sync.group_sizes, strict=False))
        states = [State(f"exchange/rows_before/{size}", (), tf.float64, per_replica=True) for size in sync.group_sizes]
        self._rows_before = store.variables(states)
        self._of_level: dict[int | None, Any] = {}

    def next(self, step: int) -> int | None:
        """See base class."""
        [(period, _), *_] = self._levels
        return (step // period + 1) * period

    def at(self, step: int) -> Mapping[str, float]:
        """See base class."""
        several = self._strategy.replicas > 1
        due = [level for level, (period, _) in enumerate(self._levels) if several and step % period == 0]
        if step % self._sync.period and due and self._last is not None:
            period, _ = self._levels[due[-1]]
            share = self._batch_size * period / self._strategy.replicas
            self._at_level(due[-1])(tf.constant(share, keras.config.floatx()))
            return {}
        found = super().at(step)
        if self._last == step:
            self._at_level(None)(tf.constant(0, keras.config.floatx()))
        return found

    @property
    def payload_per_step(self) -> float:
        """See base class; the payload of an exchange of any level, divided by the shortest period."""
        [(period, _), *_] = self._levels
        return super().payload_per_step * self._sync.period / period

    def _at_level(self, level: int | None) -> Any:
        """Returns what is compiled for the exchange of a level; None for what is left after an exchange of all."""
        if level not in self._of_level:
            function = self._begin_levels if level is None else functools.partial(self._exchange_group, level)

            def run(share: tf.Tensor) -> Any:
                return self._strategy.run(function, share)

            spec = tf.TensorSpec([], keras.config.floatx())
            self._of_level[level] = tf.function(run, autograph=False).get_concrete_function(spec)
        return self._of_level[level]

    def _begin_levels(self, share: tf.Tensor) -> None:
        """Counts the rows of all levels from here on. A replica function."""
        for before in self._rows_before:
            before.assign(self._exchange.rows)

    def _exchange_group(self, level: int, share: tf.Tensor) -> None:
        """Replaces the weights by their mean over this replica's group. A replica function.

        Args:
          level: index of the level.
          share: scalar of dtype floatx; rows that a replica with an equal share has had since the level's last exchange.
        """
        _, size = self._levels[level]
        collectives = self._strategy.collectives
        first = collectives.static_rank // size * size
        group = collectives.group(range(first, first + size))
        exchange = self._exchange
        rows = tf.cast(tf.convert_to_tensor(exchange.rows) - self._rows_before[level], share.dtype) / share
        global_weights, own = self._global_weights.values(), exchange.local_weights()
        reduced = exchange.reduction.reduce(message_of(global_weights, own, rows), group, name=f"exchange/level{level}")
        *changes, all_rows, _ = reduced.totals
        means = [
            tf.where(all_rows > 0, x - tf.math.divide_no_nan(d, tf.cast(all_rows, d.dtype)), w)  # all may have skipped
            for x, d, w in zip(global_weights, changes, own, strict=True)
        ]
        exchange.assign(constrained(self._weights, means), exchange.new_state(rows, all_rows, group), reduced.state)
        for before in self._rows_before[: level + 1]:
            before.assign(exchange.rows)
