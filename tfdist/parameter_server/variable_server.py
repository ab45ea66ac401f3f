"""Implements a parameter server, which holds variables and the optimizer that updates them."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.coordination.calls import Handler, Message
from tfdist.distribution.strategy import replica_context
from tfdist.gradients import Clip
from tfdist.parameter_server.dynamic_embedding_tables import KeyedRows
from tfdist.parameter_server.pushed_gradients import sum_payloads
from tfdist.parameter_server.table_rows import TableRows, TableSpec, sum_rows
from tfdist.parameter_server.update_order import Update

_POLL_SECONDS = 1.0
_HANDLERS = ("define", "pull", "push", "discard", "write", "fetch", "call_table", "leave_out")
_TABLE_METHODS = ("read_rows", "write_rows", "read_keys", "write_keys", "usage")
_define_lock = threading.Lock()  # because Keras is patched during a definition

NextUpdates = Callable[[int, float], Sequence[Update]]  # (version, seconds to wait) -> the updates after the version
SumOverServers = Callable[[str, float], float]  # (key, value) -> the sum of the values of all servers with this key


class VariableServer:
    """A store of variables by key, which applies updates in the order of the coordinator.

    Keys: `weight/3` is trained variable 3 of the model, `state/3` is variable 3 of the variables that layers assign, `slot/3/0`
    is the first optimizer slot of weight 3, and `optimizer/0` is the first optimizer variable that is not a slot. The server
    has only some of the rows of an embedding table and its slots.
    """

    def __init__(self, next_updates: NextUpdates, sum_over_servers: SumOverServers):
        """Initializes the server; `define` starts to apply updates."""
        self._next_updates, self._sum_over_servers = next_updates, sum_over_servers
        self._changed = threading.Condition()
        self._version = 0
        self._number = 0
        self._exact_reads = 0  # number of reads of this version, in a replay
        self._norm = 0.0
        self._update_seconds = 0.0
        self._variables: dict[str, tf.Variable] = {}
        self._weights: list[keras.Variable] = []  # tables are the last ones
        self._tables: list[TableRows] = []
        self._numbers: list[int] = []  # indices of the weights in the model
        self._state_keys: list[str] = []
        self._updated_weights: list[int] = []  # indices of weights on which the loss depends
        self._optimizer: Any = None
        self._clip = Clip()
        self._gradient_messages: dict[tuple[int, int], Message] = {}  # by ticket and worker
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._apply_updates, name="updates", daemon=True)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of calls, by name."""
        return {name: getattr(self, name) for name in _HANDLERS}

    def define(self, message: Message) -> Message:
        """Creates the variables and the optimizer, or returns `refused`, the reason why it cannot.

        Args:
          message: `weights`, with the index, path, serialized constraint or None, and whether it is excluded from weight decay
            for each, tables last; `tables`, the fields of their `TableSpec`; `lazy`, whether only rows in use are updated;
            `server`, the index of this server; `servers`, the number of servers; `states`, the indices of the states;
            `optimizer`, serialized by Keras; `floatx` and `epsilon` of Keras; `clip_norm` and `clip_value` of `Clip`. The
            arrays are the values of the weights other than tables, then of the states.
        """
        values, arrays = message.values, iter(message.arrays)
        keras.config.set_floatx(values["floatx"])
        keras.config.set_epsilon(values["epsilon"])
        with _define_lock, self._changed:
            self._number, weights = values["server"], values["weights"]
            specs = [TableSpec(*spec) for spec in values["tables"]]
            self._tables = [
                KeyedRows(spec) if spec.rule else TableRows(spec, self._number, values["servers"]) for spec in specs
            ]
            self._numbers, dense = [number for number, *_ in weights], weights[: len(weights) - len(specs)]
            self._weights = [keras_internals.variable_at(path, next(arrays)) for _, path, *_ in dense]
            self._weights += [table.variable for table in self._tables]
            try:
                for variable, (*_, constraint, _) in zip(self._weights, weights, strict=True):
                    variable.constraint = keras.constraints.deserialize(constraint) if constraint else None
                self._optimizer = keras.saving.deserialize_keras_object(values["optimizer"])
            except (TypeError, ValueError) as error:  # a user-defined class, which a server does not have
                problem = re.search(r"Could not locate [\w ]+ '\w+'", str(error)) or [str(error)]
                return Message({"refused": problem[0]})
            if excluded := [v for v, (*_, has_no_decay) in zip(self._weights, weights, strict=True) if has_no_decay]:
                self._optimizer.exclude_from_weight_decay(excluded)
            self._clip = Clip(norm=values["clip_norm"], value=values["clip_value"])
            owners = keras_internals.slot_owners(self._optimizer, self._weights, range(len(self._weights)))
            keys = [f"weight/{number}" for number in self._numbers]
            keys += optimizer_keys([owner if owner is None else self._numbers[owner] for owner in owners])
            variables = zip(keys, [*self._weights, *self._optimizer.variables], strict=True)
            self._variables = {key: keras_internals.value_of(variable) for key, variable in variables}
            self._state_keys = [f"state/{number}" for number in values["states"]]
            self._variables |= {key: tf.Variable(next(arrays), trainable=False) for key in self._state_keys}
            self._updated_weights = [*range(len(self._numbers))]
            for index, table in enumerate(self._tables, self._dense_count):
                slots = zip(self._optimizer.variables, owners, strict=True)
                table.set_slots([slot for slot, owner in slots if owner == index], lazy=values["lazy"])
            self._update = self._compile_update()
            self._gradient_messages.clear()
        if not self._thread.is_alive():
            self._thread.start()
        return Message({})

    def leave_out(self, message: Message) -> Message:
        """Excludes from updates the weights with the indices `numbers`, on which the loss does not depend."""
        with self._changed:
            self._updated_weights = [
                i for i, number in enumerate(self._numbers) if number not in message.values["numbers"]
            ]
            self._update = self._compile_update()
        return Message({})

    def pull(self, message: Message) -> Message:
        """Returns weights and states of at least `version`, the version, the latest norm, and the seconds of all updates.

        Args:
          message: `version`, and `is_exact`, whether a later version is an error. The arrays are the ids of the rows to read
            from each table; empty to skip tables.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._version >= message.values["version"])
            if self._error:
                raise RuntimeError(f"an update has failed: {self._error!r}") from self._error
            if message.values["is_exact"]:
                if self._version != message.values["version"]:
                    raise RuntimeError(f"version {message.values['version']} was updated before it was read")
                self._exact_reads += 1
                self._changed.notify_all()
            keys = [*(f"weight/{number}" for number in self._numbers[: self._dense_count]), *self._state_keys]
            rows = [table.pull(ids) for table, ids in zip(self._tables, message.arrays, strict=False)]
            # Reading does not copy: an update copies a variable first if it is still being sent.
            arrays = [*(self._variables[key].read_value() for key in keys), *rows]
            values = {"version": self._version, "norm": self._norm, "update_seconds": self._update_seconds}
            return Message(values, list(map(np.asarray, arrays)))

    def push(self, message: Message) -> Message:
        """Stores a worker's gradient, or its share of a gradient, until the coordinator orders its update.

        Args:
          message: `worker`, `ticket`, the `version` from which it was computed, and its `norm`, or None if it is a share.
            If it is a share, `with_gradient_norm` is whether to compute the norm of the sum. `methods` are the compression
            methods of the weights other than tables. The arrays are the payloads of their gradients; ids of rows and their
            gradients for each table; and values before and after the forward pass for each state, unless workers have their
            own states.
        """
        # Not under the lock, which an update holds; setting an item is atomic.
        self._gradient_messages[message.values["ticket"], message.values["worker"]] = message
        return Message({})

    def discard(self, message: Message) -> Message:
        """Removes the gradient of a `ticket` from a `worker`, which no update uses."""
        with self._changed:
            self._gradient_messages.pop((message.values["ticket"], message.values["worker"]), None)
        return Message({})

    def write(self, message: Message) -> Message:
        """Assigns the arrays to the variables `keys`; a `version` becomes the version of the weights."""
        with self._changed:
            for key, array in zip(message.values["keys"], message.arrays, strict=True):
                self._variables[key].assign(array)
            if "version" in message.values:
                self._version, self._exact_reads = message.values["version"], 0
                self._gradient_messages.clear()  # of lost workers, whose tickets were assigned again
            self._changed.notify_all()
        return Message({})

    def fetch(self, message: Message) -> Message:
        """Returns the values of the variables `keys`."""
        with self._changed:
            return Message({}, [np.asarray(self._variables[key].read_value()) for key in message.values["keys"]])

    def call_table(self, message: Message) -> Message:
        """Calls `method` of the table with index `table` with the arrays and `options`; returns the arrays of its result."""
        values = message.values
        assert values["method"] in _TABLE_METHODS  # servers run no code that a message names
        with self._changed:
            table = self._tables[self._numbers.index(values["table"]) - self._dense_count]
            result = getattr(table, values["method"])(*message.arrays, **values["options"])
        return Message({}, result if isinstance(result, tuple) else [] if result is None else [result])

    def close(self) -> None:
        """Stops applying updates."""
        self._is_closed = True

    def _apply_updates(self) -> None:
        try:
            while not self._is_closed:
                for update in self._next_updates(self._version, _POLL_SECONDS):
                    self._apply(Update(*update))
        except Exception as error:  # the next `pull` raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _apply(self, update: Update) -> None:
        with self._changed:
            while self._waits_for_reads(update) and not self._is_closed:
                self._changed.wait(_POLL_SECONDS)
            if update.version != self._version:  # belongs to an earlier range
                return
            if not update.factor:
                for worker in update.workers:
                    self._gradient_messages.pop((update.ticket, worker), None)
                self._end_update()
                return
            start_time = time.perf_counter()
            shares = [self._gradient_messages.pop((update.ticket, worker)) for worker in update.workers]
            count = self._dense_count
            gradients = [
                sum_payloads([share.arrays[i] for share in shares], method, keras_internals.value_of(self._weights[i]))
                for i, method in enumerate(shares[0].values["methods"])
            ]
            positions = range(count, count + 2 * len(self._tables), 2)
            tables = [sum_rows([(share.arrays[i], share.arrays[i + 1]) for share in shares]) for i in positions]
            gradients += [tf.constant(rows) for _, rows in tables]
            values = shares[0].values
            gradients = _scale(gradients, update.row_factor)
            gradients = self._clip_gradients(gradients, update, values["norm"], values["with_gradient_norm"])
            gradients = _scale(gradients, update.factor)
            if self._updated_weights:
                self._update(gradients, [tf.constant(ids, tf.int64) for ids, _ in tables])
            else:
                self._optimizer.iterations.assign_add(1)
            self._assign_states(shares)
            self._update_seconds += time.perf_counter() - start_time
            self._end_update()

    def _waits_for_reads(self, update: Update) -> bool:
        is_next = update.version == self._version
        return is_next and bool(update.reads) and self._exact_reads < update.reads[self._number]

    def _end_update(self) -> None:
        self._version, self._exact_reads = self._version + 1, 0
        self._changed.notify_all()

    @property
    def _dense_count(self) -> int:
        """Number of weights other than tables."""
        return len(self._weights) - len(self._tables)

    def _compile_update(self) -> Any:
        gradients = [tf.TensorSpec(v.shape, v.dtype) for v in self._weights[: self._dense_count]]
        gradients += [tf.TensorSpec([None, table.variable.shape[1]], table.variable.dtype) for table in self._tables]
        signature = (gradients, [tf.TensorSpec([None], tf.int64) for _ in self._tables])
        return tf.function(self._optimizer_update, input_signature=signature, autograph=False)

    def _optimizer_update(self, gradients: Sequence[tf.Tensor], ids: Sequence[tf.Tensor]) -> None:
        keras_internals.disable_gradient_aggregation(self._optimizer)
        with replica_context(), contextlib.ExitStack() as updates:  # gradients are already summed over workers
            updated_gradients = [
                gradients[i]
                if i < self._dense_count
                else updates.enter_context(
                    self._tables[i - self._dense_count].updating(ids[i - self._dense_count], gradients[i])
                )
                for i in self._updated_weights
            ]
            self._optimizer.apply(updated_gradients, [self._weights[i] for i in self._updated_weights])

    def _clip_gradients(
        self, gradients: list[tf.Tensor], update: Update, norm: float | None, with_gradient_norm: bool
    ) -> list[tf.Tensor]:
        """Clips gradients by their norm over all servers, which is the same on each server."""
        dtype = keras.config.floatx()
        if norm is not None:
            return self._clip(gradients, tf.constant(norm, dtype))
        if not (self._clip.norm or self._clip.value or with_gradient_norm):
            return gradients
        squares = [tf.cast(tf.reduce_sum(tf.square(gradient)), dtype) for gradient in gradients]
        local_sum = float(tf.add_n(squares)) if squares else 0.0
        norm = tf.sqrt(tf.constant(self._sum_over_servers(f"norm/{update.ticket}", local_sum), dtype))
        self._norm = float(norm)
        return self._clip(gradients, norm)

    def _assign_states(self, shares: Sequence[Message]) -> None:
        """Assigns new states, or adds their changes if they were computed from an older version.

        The states of several shares are averaged, like moving statistics of which each worker has its own.
        """
        start = self._dense_count + 2 * len(self._tables)
        is_current = shares[0].values["version"] == self._version
        for i, key in zip(range(start, len(shares[0].arrays), 2), self._state_keys, strict=False):
            variable = self._variables[key]
            previous_value, new_value = shares[0].arrays[i : i + 2]
            if not variable.dtype.is_floating:
                variable.assign(new_value)
                continue
            new_value = sum((share.arrays[i + 1] for share in shares[1:]), new_value) / len(shares)
            variable.assign(new_value if is_current else variable + (new_value - previous_value))


def _scale(gradients: list[tf.Tensor], factor: float) -> list[tf.Tensor]:
    return gradients if factor == 1 else [gradient * tf.constant(factor, gradient.dtype) for gradient in gradients]


def optimizer_keys(owners: Sequence[int | None]) -> list[str]:
    """Returns the keys of an optimizer's variables, given the index of the weight to which each belongs, or None."""
    kinds = ["optimizer" if number is None else f"slot/{number}" for number in owners]
    return [f"{kind}/{kinds[:position].count(kind)}" for position, kind in enumerate(kinds)]
