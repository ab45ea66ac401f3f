"""Tables with a row per key in the process of a single device."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import OptimizerShards
from tfdist.parameter_server.embedding_tables import EmbeddingTables
from tfdist.parameter_server.keyed_rows import keyed_layers

if TYPE_CHECKING:
    from tfdist.distribution.strategy import Strategy


class LocalTables(EmbeddingTables):
    """The tables of a model with a row per key, which are updated in this process, in compiled steps."""

    def __init__(self, strategy: "Strategy", model: keras.Model, optimizer: keras.Optimizer):
        """Connects the tables with the slots of the optimizer, which is built."""
        weights = list(model.trainable_variables)
        super().__init__(strategy, None, weights, model)
        slots = keras_internals.slots_by_weight(optimizer, weights)
        for number in self.numbers:  # before its first update, an optimizer has not used restored slots
            self._tables[number].set_slots(slots[number], keeps_slots=int(optimizer.iterations) > 0)

    def has_any(self, variables: Sequence[keras.Variable]) -> bool:
        """Returns whether any of these variables is a table's."""
        return any(variable is table for variable in variables for table in self._variables.values())

    @contextlib.contextmanager
    def rows_in_step(self, batch: Any) -> Iterator[None]:
        """Context of a forward pass with gradients, in which tables have the rows of a batch."""
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
        """Context of an update by the optimizer; yields the gradients of the variables."""
        numbers = {id(variable): number for number, variable in self._variables.items()}
        all_gradients = list(gradients)
        with contextlib.ExitStack() as updates:
            for i, number in enumerate(numbers.get(id(variable)) for variable in variables):
                if number is not None:
                    ids = tf.convert_to_tensor(self._ids[number])
                    all_gradients[i] = updates.enter_context(self._tables[number].updating(ids, gradients[i]))
            yield all_gradients


class LocalRows(OptimizerShards):
    """Updates tables with a row per key in this process, as servers do."""

    def __init__(self, strategy: "Strategy"):
        """Initializes without a model."""
        super().__init__(strategy)
        self._tables: list[LocalTables] = []  # of each model with such tables

    def build(self, model: keras.Model) -> None:
        """See base class."""
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
        """See base class."""
        tables = self._of(variables)
        with tables.updating(gradients, variables) if tables else contextlib.nullcontext(gradients) as all_gradients:
            super().apply(optimizer, all_gradients, variables)

    def _of(self, variables: Sequence[keras.Variable]) -> LocalTables | None:
        return next((tables for tables in reversed(self._tables) if tables.has_any(variables)), None)
