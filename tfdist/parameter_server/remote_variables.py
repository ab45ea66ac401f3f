"""Gives a worker access to the variables on the servers: copies of weights, and remote tables and optimizer slots."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.staleness import BY_SIZE, LAZY, Staleness
from tfdist.distribution.strategy import JobVariables, OptimizerShards, Read, Strategy, VariableBlocks
from tfdist.errors import InputError, byte_size, count_of
from tfdist.gradients import Clip
from tfdist.parameter_server.embedding_tables import EmbeddingTables, RemoteTable, RemoteVariable, is_table
from tfdist.parameter_server.pushed_gradients import as_tensor
from tfdist.parameter_server.servers import Servers, bytes_by_server
from tfdist.parameter_server.variable_server import optimizer_keys


class RemoteVariables(OptimizerShards):
    """The variables of a model on one worker, which has copies of the weights, and an optimizer without slots.

    Attributes:
      servers: the servers.
      staleness: the rule for when gradients are applied.
      whole_batches: whether a worker computes the whole batch of a step, instead of a share.
      tolerate_lost_workers: function to call so that training continues if workers that compute whole batches are lost.
      sparse_updates: how embedding tables are updated: "exact" or "lazy".
      tables: the embedding tables that are split by rows.
      records_updates: whether to record all updates, so that they can be replayed.
      states: variables assigned by layers that are also on the servers, if an update may not use all workers; otherwise empty,
        because each worker has its own state, like a replica.
      worker_states: variables of which each worker has its own value, such as errors of compressed gradients.
      collected_states: on the chief, their values by `id` and worker; see `collect_states`.
    """

    def __init__(
        self,
        strategy: Strategy,
        servers: Servers,
        staleness: Staleness,
        tolerate_lost_workers: Callable[[], object],
        *,
        sparse_updates: str,
        min_table_bytes: int,
    ):
        """Initializes the variables; see the attributes. Embeddings of at least `min_table_bytes` are split by rows."""
        super().__init__(strategy)
        self.tolerate_lost_workers = tolerate_lost_workers
        self.sparse_updates, self._min_table_bytes = sparse_updates, min_table_bytes
        self.tables: EmbeddingTables  # after `build`
        self._is_chief, self.servers, self.staleness = strategy.is_chief, servers, staleness
        self.whole_batches, self.records_updates = staleness.whole_batches, False
        self._non_slots: dict[str, keras.Variable] = {}  # other than slots, by key
        self._slot_values: list[tuple[RemoteVariable, np.ndarray]] = []  # of an optimizer that is already built
        self._weights: list[keras.Variable] = []
        self._server_values: dict[str, np.ndarray] = {}  # on the chief, the values that it last pulled
        self.states: list[keras.Variable] = []
        self.worker_states: list[tf.Variable] = []
        self.collected_states: dict[int, dict[int, np.ndarray]] = {}

    @property
    def description(self) -> str:
        """Describes the servers, for example `198.5 KiB of weights on 1 server; staleness bounded(4)`."""
        keyed = self.tables.keyed
        rows = {n: self._weights[n].shape[0] for n in self.tables.numbers if n not in keyed}
        sizes = [keras_internals.bytes_of(variable) for variable in self._weights]
        server_loads = bytes_by_server(sizes, self.servers.placement[: len(sizes)], rows, self.servers.count)
        tables = f"{count_of(len(rows), 'table')} by rows, {self.sparse_updates} updates; " if rows else ""
        tables += f"{count_of(len(keyed), 'table')} with a row per key; " if keyed else ""
        method = "" if self.servers.shard_variables == BY_SIZE else f" by {self.servers.shard_variables}"
        size_text, server_text = " + ".join(map(byte_size, server_loads)), count_of(len(server_loads), "server")
        return f"{size_text} of weights on {server_text}{method}; {tables}staleness {self.staleness}"

    def creation(self) -> contextlib.AbstractContextManager[None]:
        """Context for creating layers, in which tables that will be split by rows get no values."""
        return keras_internals.deferred_weights(lambda v: is_table(v, self._min_table_bytes, self.servers.count))

    def deferred_build(self, model: keras.Model) -> contextlib.AbstractContextManager:
        return keras_internals.patched((model, "optimizer", None))

    def build(self, model: keras.Model) -> None:
        self._weights = list(model.trainable_variables)
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # of a `LossScaleOptimizer`
        self.tables = EmbeddingTables(self._strategy, self.servers, self._weights, model)
        self.states = keras_internals.moving_statistics(model) if self.staleness.has_server_states else []
        is_built = optimizer.built  # for example in a loaded model
        owners = keras_internals.slot_owners(optimizer, self._weights, self.tables.keyed)
        if optimizer is not model.optimizer:
            model.optimizer.build(self._weights)  # creates the variables of a `LossScaleOptimizer`
        if len(owners) != len(optimizer.variables):
            raise InputError(
                f"An optimizer must have been built with the variables that it updates. Received: {optimizer.name}, which has "
                f"{len(optimizer.variables)} variables instead of {len(owners)}. Compile the model with a new optimizer."
            )
        weights, states = (
            [(v.path, keras_internals.bytes_of(v)) for v in variables] for variables in (self._weights, self.states)
        )
        self.servers.place(weights, states, self.tables.numbers, self.tables.keyed)
        self._non_slots, self._server_values, self._slot_values = {}, {}, []
        for key, variable, number in zip(optimizer_keys(owners), optimizer.variables, owners, strict=True):
            if number is None:
                self._non_slots[key] = variable
            if number is None or number in self.tables.keyed:
                continue
            remote_class = RemoteTable if number in self.tables.numbers else RemoteVariable
            remote = remote_class(key, variable, self.servers, is_chief=self._is_chief)
            if is_built:
                self._slot_values.append((remote, _array(variable)))
            keras_internals.set_tf_variable(variable, remote)
        self.servers.models += 1

    def is_on_all_replicas(self, variable: keras.Variable) -> bool:
        return not self.is_remote(variable)

    @staticmethod
    def is_remote(variable: Any) -> bool:
        """Returns whether this worker has no copy of a Keras variable."""
        return isinstance(variable, keras.Variable) and isinstance(keras_internals.value_of(variable), RemoteVariable)

    def define(self, optimizer: keras.Optimizer, clip: Clip) -> str:
        """Creates the variables on the servers with the values of this process, the chief; see `Servers.define`."""
        excluded_names = getattr(optimizer, "_exclude_from_weight_decay", None) or ()

        def form(variable: keras.Variable) -> tuple[str, Any, bool]:
            constraint = keras.constraints.serialize(variable.constraint) if variable.constraint else None
            return variable.path, constraint, any(name in variable.path for name in excluded_names)

        weights = dict(enumerate(self._weights))
        refusal = self.servers.define(
            {number: _array(weights[number]) for number in weights.keys() - self.tables.numbers},
            [_array(variable) for variable in self.states],
            {number: form(variable) for number, variable in weights.items()},
            self.tables.specs,
            lazy=self.sparse_updates == LAZY,
            optimizer=keras.saving.serialize_keras_object(optimizer),
            floatx=keras.config.floatx(),
            epsilon=keras.config.epsilon(),
            clip_norm=clip.norm,
            clip_value=clip.value,
        )
        if not refusal:
            self.tables.write_initial_values()
            for remote, value in self._slot_values:
                remote.assign(value)
        self._slot_values = []
        return refusal

    def write_changes(self, version: int) -> None:
        """Sends values that were assigned since the last `pull`, such as a learning rate; only called on the chief."""
        known = self._server_values
        changed = {k: v for k, v in self._values().items() if k not in known or not np.array_equal(v, known[k])}
        self.servers.write(changed, version=version)

    def pull(
        self, version: int | Sequence[int], ids: Sequence[np.ndarray] = ()
    ) -> tuple[list[int], list[np.ndarray], float]:
        """Assigns weights and states of at least this version, and the rows `ids` of each table; see `Servers.pull`.

        Returns the version of each server, the states, and the latest gradient norm that was requested.
        """
        versions, weights, states, norm = self.servers.pull(version, ids)
        for number, (variable, value) in enumerate(zip(self._weights, weights, strict=True)):
            if number not in self.tables.numbers:
                keras_internals.value_of(variable).assign(as_tensor(value))
        self.assign_states(states)
        if ids:
            self.tables.assign(ids, [weights[number] for number in self.tables.numbers])
        return versions, states, norm

    def assign_states(self, states: Sequence[np.ndarray]) -> None:
        """Assigns copies of values that `pull` has returned to the states, because a step changes them."""
        for variable, value in zip(self.states, states, strict=True):
            keras_internals.value_of(variable).assign(value)

    def collect_states(self) -> None:
        """Sends the values of `worker_states` to the chief, which saves them; every worker must call it."""
        if not self.worker_states:
            return
        arrays = self.servers.gather([variable.numpy() for variable in self.worker_states], receiver=0)
        values = [dict(zip(self.servers.workers, each, strict=True)) for each in zip(*arrays, strict=True)]
        self.collected_states = {id(v): each for v, each in zip(self.worker_states, values, strict=False)}

    def pull_all(self, version: int) -> float:
        """Pulls all variables, including the optimizer's variables other than slots; returns the norm. See `pull`."""
        *_, norm = self.pull(version)
        for key, value in self.servers.fetch(self._non_slots).items():
            self._non_slots[key].assign(value)
        if self._is_chief:
            self._server_values = self._values()
        return norm

    def describe_row_use(self) -> list[str]:
        """Describes how often rows of each table have been pulled, or how many keys have a row."""
        parts = [self.servers.call_table(number, "usage") for number in self.tables.numbers]
        uses = [[int(sum(counts)) for counts in zip(*of_table, strict=True)] for of_table in parts]
        return [
            f"{self._weights[number].path}: {first:,} keys have a row, {second:,} do not yet; {third:,} rows were evicted."
            if number in self.tables.keyed
            else f"{self._weights[number].path}: {first:,} of {self._weights[number].shape[0]:,} rows were used; of their "
            f"{second:,} pulls, {100 * third / second:.0f}% were of the most frequent 1% of all rows."
            for number, (first, second, third) in zip(self.tables.numbers, uses, strict=True)
            if second or number in self.tables.keyed
        ]

    def _values(self) -> dict[str, np.ndarray]:
        variables = {f"weight/{i}": v for i, v in enumerate(self._weights) if i not in self.tables.numbers}
        variables |= {f"state/{i}": variable for i, variable in enumerate(self.states)} | self._non_slots
        return {key: _array(variable) for key, variable in variables.items()}


def _array(variable: keras.Variable) -> np.ndarray:
    """Returns the value, which shares the memory of the variable until the next assignment."""
    return np.asarray(tf.convert_to_tensor(keras_internals.value_of(variable)))


class RemoteBlocks(VariableBlocks):
    """Reads and writes remote variables on the chief, tables in blocks.

    If workers compute whole batches, the chief saves the values of all replicas, because other workers may be lost. All
    replicas have the servers' values, except for states that the chief collects. States of a lost worker are zeros.
    """

    def job_variables(self, forms: Mapping[str, Any]) -> JobVariables:
        self._strategy.remote.collect_states()
        return super().job_variables(forms)

    def saved_blocks(
        self, variable: Any, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        remote = self._strategy.remote
        if isinstance(variable, RemoteVariable):
            return [((0,) * len(variable.shape), variable.numpy())] if self._writes_replicated else []
        if not (per_replica and remote.whole_batches):
            return super().saved_blocks(variable, per_replica, copied)
        states = remote.collected_states.get(id(variable))
        return [
            ((replica, *offset), (values if states is None else states.get(replica, np.zeros_like(values)))[np.newaxis])
            for offset, values in super().saved_blocks(variable, False, copied)
            for replica in range(self._strategy.replicas)
        ]

    def assign(self, variable: Any, per_replica: bool, read: Read) -> None:
        if not isinstance(variable, RemoteTable):
            super().assign(variable, per_replica, read)
        elif self._writes_replicated:
            variable.assign_blocks(lambda begin, end: read((begin, 0), (end - begin, int(variable.shape[1]))))
