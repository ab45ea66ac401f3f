"""Embedding tables of which a worker has no copy, but pulls the rows that a batch uses.

In a training step, rows are pulled in one message with the other weights, and have the same version. A forward pass in
which lookups return zeros determines the ids first; TensorFlow prunes all its other operations. The model may thus compute
the ids, for example with `keras.layers.StringLookup`. Outside of training steps, each lookup pulls its rows.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, collectives_scope
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import OptimizerShards, Strategy
from tfdist.errors import InputError
from tfdist.parameter_server.dynamic_embedding_tables import KeyedTable, keyed_layers
from tfdist.parameter_server.servers import Servers
from tfdist.parameter_server.table_rows import TableSpec, blocks, growing_variable, read_in_blocks
from tfdist.row_semantics.declarations import GRAPH

_ELEMENTWISE_OPTIMIZERS = "SGD RMSprop Adam AdamW Adagrad Adadelta Adamax Nadam Ftrl Lion".split()
_UNKNOWN_IDS = (
    "The ids of an embedding that parameter servers split by rows must depend on the batch alone. Received: ids that changed "
    "during the step, because the model samples them or computes them from rows. Use a larger --min_table_bytes."
)
_ids_by_table: contextvars.ContextVar[dict[int, list[tf.Tensor]] | None] = contextvars.ContextVar("ids", default=None)


class RemoteVariable:
    """A variable without a copy on the worker: reading fetches its value, and assigning on the chief sends it.

    Operations on it are placed on any device.
    """

    device = ""

    def __init__(self, key: str, variable: keras.Variable, servers: Servers, *, is_chief: bool):
        """Initializes the access to a variable by its key on the servers. If all processes assign it, the chief writes it."""
        self._key, self._servers, self._is_chief = key, servers, is_chief
        self._model = servers.models + 1  # number of the model that is being built
        self._path = variable.path
        self.shape, self.dtype = tf.TensorShape(variable.shape), tf.as_dtype(variable.dtype)
        self._bytes = keras_internals.bytes_of(variable)

    def numpy(self) -> np.ndarray:
        """Returns the value."""
        self._servers.check_holds(self._model)
        return self._servers.fetch([self._key])[self._key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.constant(self.numpy(), dtype, name=name)

    def assign(self, value: Any) -> None:
        """Assigns a value."""
        self._servers.check_holds(self._model)
        if self._is_chief:
            self._servers.write({self._key: np.asarray(value, self.dtype.as_numpy_dtype)})


class RemoteTable(RemoteVariable):
    """An embedding table or its optimizer slot, whose rows are spread over all servers and sent in blocks."""

    is_read_as_whole = False

    @property
    def _unique_id(self) -> str:
        """The key by which Keras's optimizers identify a variable."""
        return self._key

    def check(self, ids: np.ndarray) -> np.ndarray:
        """Returns the ids; raises `InputError` if an id is out of range, or if a layer has read the whole table."""
        self.check_is_only_looked_up()
        invalid_ids = ids[(ids < 0) | (ids >= int(self.shape[0]))]
        if len(invalid_ids):
            raise keras_internals.without_call_context(
                InputError(
                    f"Ids of the embedding {self._path} must be in [0, {self.shape[0]}). Received: {invalid_ids[0]}. Make "
                    "input_dim larger, or correct the data."
                )
            )
        return ids

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the rows with these ids."""
        return self._servers.read_rows(self._key, self.check(ids))

    def numpy(self) -> np.ndarray:
        """Returns the value, as a memory-mapped file if the table is large."""
        dtype = self.dtype.as_numpy_dtype
        return read_in_blocks(self.shape.as_list(), dtype, lambda begin, end: self.rows(np.arange(begin, end)))

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows with these ids outside of training steps, [ids, features]."""
        return _look_up(self.rows, ids, self)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        if tf.executing_eagerly():
            return super().__tf_tensor__(dtype, name)
        self.is_read_as_whole = True
        if _ids_by_table.get() is None and not _is_labelled():
            self.check_is_only_looked_up()
        return tf.zeros(self.shape, self.dtype)  # nothing is computed from it in a graph

    def check_is_only_looked_up(self) -> None:
        """Raises `InputError` if a layer has read the table in another way than by lookups."""
        if self.is_read_as_whole:
            raise InputError(
                "An embedding that parameter servers split by rows can only be looked up. Received: a layer that reads all "
                f"of {self._path}. Use --min_table_bytes={self._bytes + 1} to keep it whole."
            )

    def assign(self, value: Any) -> None:
        """Assigns a value."""
        self.assign_blocks(lambda begin, end: np.asarray(value[begin:end], self.dtype.as_numpy_dtype))

    def assign_blocks(self, read: Callable[[int, int], np.ndarray]) -> None:
        """Assigns a value, of which `read` returns the rows [begin, end)."""
        for begin, end in blocks(self.shape.as_list(), self.dtype) if self._is_chief else ():
            self._servers.write_rows(self._key, np.arange(begin, end), read(begin, end))


def _look_up(read: Callable[[np.ndarray], np.ndarray], ids: tf.Tensor, table: RemoteTable | KeyedTable) -> tf.Tensor:
    unique_ids, positions = tf.unique(ids)
    rows = tf.numpy_function(read, [unique_ids], table.dtype)
    return tf.gather(tf.ensure_shape(rows, [None, table.shape[1]]), positions)


class RemoteKeyedTable(KeyedTable):
    """A table with a row per key on the servers; only the chief changes it outside of updates."""

    def __init__(self, number: int, table: KeyedTable, servers: Servers, *, is_chief: bool):
        """Initializes the access to the trained variable with index `number`; `table` has its shape and dtype."""
        self._number, self._servers, self._is_chief = number, servers, is_chief
        self.shape, self.dtype = table.shape, table.dtype

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        return _look_up(self.read_rows, keys, self)

    def restore(self, arrays: Mapping[str, Any], *, with_slots: bool = True) -> None:
        if self._is_chief:
            super().restore(arrays, with_slots=with_slots)

    def read_keys(self) -> tuple[np.ndarray, ...]:
        keys, candidates, counts = zip(*self._servers.call_table(self._number, "read_keys"), strict=True)
        return np.concatenate(keys), np.concatenate(candidates), counts[0]

    def write_keys(self, keys: np.ndarray, candidates: np.ndarray, counts: np.ndarray) -> None:
        parts = [[a[own] for own, _ in self._servers.split(self._number, a[:, 0])] for a in (keys, candidates)]
        self._servers.call_table(self._number, "write_keys", [[*each, counts] for each in zip(*parts, strict=True)])

    def read_rows(self, keys: np.ndarray, index: int = 0) -> np.ndarray:
        return self._servers.read_rows(self._key(index), keys)

    def write_rows(self, keys: np.ndarray, rows: np.ndarray, index: int = 0) -> None:
        self._servers.write_rows(self._key(index), keys, rows)

    def _key(self, index: int) -> str:
        return f"slot/{self._number}/{index - 1}" if index else f"weight/{self._number}"


def is_table(layer: keras.Layer, min_bytes: int, servers: int) -> bool:
    """Returns whether a layer is to be split by rows: an embedding of at least `min_bytes` that is only looked up."""
    if not keras_internals.is_only_looked_up(layer) or layer.input_dim < servers:
        return False
    return layer.input_dim * layer.output_dim * tf.as_dtype(layer.variable_dtype).size >= min_bytes


class EmbeddingTables:
    """The embedding tables of a model.

    Attributes:
      numbers: indices of the tables among the trained variables.
      keyed: indices of the tables with a row per key.
      specs: of the tables that servers create, by index, in order.
    """

    def __init__(
        self, strategy: Strategy, servers: Servers | None, weights: Sequence[keras.Variable], model: keras.Model
    ):
        """Replaces the lookups of the tables' layers in a model, whose trained variables are `weights`.

        Without servers, tables with a row per key are in this process.

        Raises:
          InputError: the optimizer cannot update rows independently.
        """
        self._strategy, self._model, self._is_in_step = strategy, model, False
        order = {id(variable): number for number, variable in enumerate(weights)}
        self._variables: dict[int, keras.Variable] = {}
        self._tables: dict[int, Any] = {}  # `RemoteTable` or `KeyedTable`
        self._initial: dict[int, Any] = {}
        self.specs: dict[int, TableSpec] = {}
        for layer in keras_internals.embeddings_without_copy(model, RemoteTable):
            variable = keras_internals.kernel_of(layer)
            if servers and id(variable) in order:
                self._add_table(order[id(variable)], layer, servers)
            else:  # the layer was frozen after its creation
                keras_internals.initialize(variable)
        for layer in keyed_layers(model):
            if layer.trainable:
                self._add_keyed_table(order[id(layer.embeddings)], layer, servers)
        self.keyed = frozenset(n for n, table in self._tables.items() if isinstance(table, KeyedTable))
        self.specs = dict(sorted(self.specs.items()))
        self.numbers = sorted(self._variables)
        if self.numbers:
            _check_updates_rows(model.optimizer)
        self._ids = {number: tf.Variable(tf.zeros([0], tf.int64), shape=[None]) for number in self.numbers}
        no_rows = {number: tf.zeros([0, table.shape[1]], table.dtype) for number, table in sorted(self._tables.items())}
        self._rows = {number: growing_variable(rows, trainable=True) for number, rows in no_rows.items()}
        self._record = tf.function(
            lambda batch: strategy.run(self._record_ids, batch), autograph=False, reduce_retracing=True
        )

    def _add_table(self, number: int, layer: keras.layers.Embedding, servers: Servers) -> None:
        variable, is_chief = keras_internals.kernel_of(layer), self._strategy.is_chief
        value = keras_internals.value_of(variable)
        initializer = None if value else keras_internals.rows_initializer(variable)
        if initializer is None and is_chief:
            self._initial[number] = np.asarray(value or keras_internals.initial_value(variable))
        self.specs[number] = TableSpec(variable.path, tuple(variable.shape), variable.dtype, initializer)
        self._variables[number] = variable
        self._tables[number] = table = RemoteTable(f"weight/{number}", variable, servers, is_chief=is_chief)
        keras_internals.set_tf_variable(variable, table)
        keras_internals.set_lookup(layer, functools.partial(self._lookup, number, layer))

    def _add_keyed_table(self, number: int, layer: Any, servers: Servers | None) -> None:
        self.specs[number] = layer.table_spec()
        self._variables[number], table = layer.embeddings, layer.table
        if servers:
            if not isinstance(table, RemoteKeyedTable):  # the table may have been loaded from a file
                self._initial[number] = table.export()
            table = layer.table = RemoteKeyedTable(number, table, servers, is_chief=self._strategy.is_chief)
        self._tables[number] = table
        layer.gather = functools.partial(self._gather_rows, number)

    def write_initial_values(self) -> None:
        """Sends the initial values that servers cannot compute."""
        for number, value in self._initial.items():
            self._tables[number].restore(value) if number in self.keyed else self._tables[number].assign(value)
        self._initial.clear()

    def ids(self, batch: Any) -> list[np.ndarray]:
        """Returns the sorted, distinct ids that a batch looks up in each table; empty without tables."""
        # With counts, NumPy sorts, which is faster here than its hash table.
        all_ids = [np.unique(ids, return_counts=True)[0] for ids in (self._record(batch) if self.numbers else ())]
        return [self._tables[number].check(ids) for number, ids in zip(self.numbers, all_ids, strict=True)]

    def assign(self, ids: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> None:
        """Sets the rows of each table that the next step uses."""
        for number, table_ids, table_rows in zip(self.numbers, ids, rows, strict=True):
            self._ids[number].assign(table_ids)
            self._rows[number].assign(table_rows)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Context for tracing a training step, in which tables contain only the assigned rows."""
        variables = [self._variables[number] for number in self.numbers]
        with (
            keras_internals.patched((self, "_is_in_step", True)),
            keras_internals.values_replaced(variables, [*self._rows.values()]),
        ):
            yield

    @contextlib.contextmanager
    def check_known_ids(self) -> Iterator[None]:
        """Context for a training step that raises `InputError` if the step looks up rows that were not assigned."""
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            raise InputError(_UNKNOWN_IDS) if _UNKNOWN_IDS in str(error) else error from None

    def _record_ids(self, batch: Any) -> list[tf.Tensor]:
        """Runs a forward pass to determine the ids that each table looks up."""
        ids_by_table: dict[int, list[tf.Tensor]] = {number: [] for number in self.numbers}
        batch = batch.batch if isinstance(batch, ReplicaRows) else batch
        x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        recording = keras_internals.context_value(_ids_by_table, ids_by_table)
        with recording, collectives_scope(OneReplica()), keras.StatelessScope():  # discards the layers' assignments
            self._model(x, training=True)
        return [tf.concat([tf.zeros([0], tf.int64), *ids_by_table[number]], 0) for number in self.numbers]

    def _lookup(self, number: int, layer: Any, inputs: Any) -> Any:
        """Returns the output of `keras.layers.Embedding` for ids of any shape."""
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._lookup(number, layer, inputs.flat_values))
        ids = tf.cast(inputs, tf.int64)
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)  # as Keras does
        return tf.cast(gather_shaped(functools.partial(self._gather_rows, number), ids), layer.compute_dtype)

    def _gather_rows(self, number: int, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows of a table with these ids, [ids, features]."""
        table = self._tables[number]
        if _is_labelled():
            return tf.gather(tf.zeros(table.shape, table.dtype), ids - ids if number in self.keyed else ids)
        if (ids_by_table := _ids_by_table.get()) is not None:
            ids_by_table[number].append(ids)
            return tf.zeros([tf.size(ids), table.shape[1]], table.dtype)
        if not self._is_in_step:
            return table.lookup(ids)
        step_ids = tf.convert_to_tensor(self._ids[number])
        positions = tf.minimum(tf.searchsorted(step_ids, ids), tf.size(step_ids) - 1)
        with tf.control_dependencies([tf.debugging.assert_equal(tf.gather(step_ids, positions), ids, _UNKNOWN_IDS)]):
            return tf.gather(tf.convert_to_tensor(self._rows[number]), positions)


def gather_shaped(gather: Callable[[tf.Tensor], tf.Tensor], ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of ids of any shape, [..., features], given `gather`, which returns the rows of a vector of ids."""
    rows = gather(tf.reshape(ids, [-1]))
    outputs = tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))
    outputs.set_shape([*ids.shape, *rows.shape[1:]])
    return outputs


def _is_labelled() -> bool:
    """Returns whether this graph is traced to analyze the relation between rows; see `tfdist.row_semantics`."""
    return getattr(tf.compat.v1.get_default_graph(), "name", "") == GRAPH


def _check_updates_rows(optimizer: keras.Optimizer) -> None:
    """Raises `InputError` for an optimizer whose update of a row depends on other rows."""
    kind = type(optimizer)
    is_elementwise = kind.__module__.startswith("keras.") and kind.__name__ in _ELEMENTWISE_OPTIMIZERS
    if not is_elementwise or optimizer.clipnorm or optimizer.use_ema:
        received = "clipnorm" if optimizer.clipnorm else "use_ema" if optimizer.use_ema else kind.__name__
        raise InputError(
            "Embeddings whose rows are updated separately need an optimizer that updates rows independently: one of "
            f"Keras's {', '.join(_ELEMENTWISE_OPTIMIZERS)}, without clipnorm and use_ema. Received: {received}. Use "
            "another optimizer, or a larger --min_table_bytes."
        )


class LocalTables(EmbeddingTables):
    """The tables of a model with a row per key, which are updated in this process, in compiled steps."""

    def __init__(self, strategy: Strategy, model: keras.Model, optimizer: keras.Optimizer):
        """Connects the tables with the slots of the optimizer, which is built."""
        weights = list(model.trainable_variables)
        super().__init__(strategy, None, weights, model)
        self.variable_ids = {id(variable): number for number, variable in self._variables.items()}  # indices of tables
        owners = keras_internals.slot_owners(optimizer, weights, ())
        for number in self.numbers:  # an optimizer that has not updated anything yet does not keep restored slots
            slots = [slot for slot, owner in zip(optimizer.variables, owners, strict=True) if owner == number]
            self._tables[number].set_slots(slots, keeps_slots=int(optimizer.iterations) > 0)

    @contextlib.contextmanager
    def rows_in_step(self, batch: Any) -> Iterator[None]:
        """Context for a forward pass with gradients, in which tables contain the rows of a batch."""
        for number, ids in zip(self.numbers, self._record_ids(batch), strict=True):
            unique_ids, table = tf.sort(tf.unique(ids)[0]), self._tables[number]
            self._ids[number].assign(unique_ids)
            rows = tf.numpy_function(table.pull, [unique_ids], table.dtype)
            self._rows[number].assign(tf.ensure_shape(rows, [None, table.shape[1]]))
        with self.in_step():
            yield

    @contextlib.contextmanager
    def updating(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> Iterator[list[tf.Tensor]]:
        """Context for an update by the optimizer; yields the gradients of the variables."""
        all_gradients = list(gradients)
        with contextlib.ExitStack() as updates:
            for i, number in enumerate(self.variable_ids.get(id(variable)) for variable in variables):
                if number is not None:
                    ids = tf.convert_to_tensor(self._ids[number])
                    all_gradients[i] = updates.enter_context(self._tables[number].updating(ids, gradients[i]))
            yield all_gradients


class LocalRows(OptimizerShards):
    """Updates tables with a row per key in this process, as servers do."""

    def __init__(self, strategy: Strategy):
        super().__init__(strategy)
        self._tables: list[LocalTables] = []  # of each model with such tables

    def build(self, model: keras.Model) -> None:
        if keyed_layers(model):
            optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # of a `LossScaleOptimizer`
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._tables.append(LocalTables(self._strategy, model, optimizer))

    def gradient_shape(self, variable: keras.Variable) -> tf.TensorShape:
        """See `Strategy.gradient_shape`."""
        return tf.TensorShape([None, variable.shape[1]]) if self._of([variable]) else variable.shape

    def rows_in_step(self, variables: Sequence[keras.Variable], batch: Any) -> contextlib.AbstractContextManager:
        """Context in which the gradients of variables for a batch are computed, in a replica function."""
        tables = self._of(variables)
        return tables.rows_in_step(batch) if tables else contextlib.nullcontext()

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        tables = self._of(variables)
        with tables.updating(gradients, variables) if tables else contextlib.nullcontext(gradients) as all_gradients:
            super().apply(optimizer, all_gradients, variables)

    def _of(self, variables: Sequence[keras.Variable]) -> LocalTables | None:
        ids = {id(variable) for variable in variables}
        return next((tables for tables in reversed(self._tables) if not ids.isdisjoint(tables.variable_ids)), None)
