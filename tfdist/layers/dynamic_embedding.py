"""An embedding with a row per key instead of a fixed vocabulary."""

from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import strategy_in_use
from tfdist.errors import InputError
from tfdist.parameter_server.dynamic_embedding_tables import KeyedRows, KeyedTable, rows_initializer
from tfdist.parameter_server.embedding_tables import gather_shaped
from tfdist.parameter_server.table_rows import TableSpec


@keras.saving.register_keras_serializable("tfdist")
class DynamicEmbedding(keras.layers.Layer):
    """An embedding whose table has a row for each key that occurs often enough, without a vocabulary or collisions.

    Keys are integers or strings; for a string, 63 bits of its hash are used. A key is counted once in each training step
    whose batch contains it. The step in which its count reaches `admit_after` creates its row, and is the first step that
    trains the row. Until then, the key's embedding is zero, as are embeddings of unknown keys in evaluations and
    predictions (DeepRec's counter filter). The initial row is a function of the initializer's seed and the key, so results
    depend neither on the order of keys nor on the number of servers.

    With `--strategy=parameter_server`, rows and their optimizer slots are on the servers, distributed by the hash of the
    key; with `single`, they are in the process. A step pulls and updates the rows of the distinct keys in its batch, and
    leaves other rows and slots unchanged, as with `--sparse_updates=lazy`. Memory is proportional to the number of rows,
    plus about 100 bytes for each key without a row.

    Checkpoints and `.keras` files contain keys, rows, slots and counts; the result of `get_weights` does not.
    """

    def __init__(
        self,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        admit_after: int = 1,
        evict_after: int = 0,
        **kwargs: Any,
    ):
        """Initializes the layer.

        Args:
          output_dim: length of a row, at least 1.
          embeddings_initializer: Keras's `RandomUniform`, `RandomNormal`, `Zeros` or `Constant`, or its name.
          admit_after: number of steps that must contain a key before it gets a row, at least 1.
          evict_after: number of steps without a key after which its row, slots and count are removed, the next time
            that the total number of steps is a multiple of it; 0 disables removal.
          **kwargs: arguments of `keras.layers.Layer`.

        Raises:
          InputError: an argument is invalid.
        """
        super().__init__(**kwargs)
        integers = {"output_dim": (output_dim, 1), "admit_after": (admit_after, 1), "evict_after": (evict_after, 0)}
        for name, (value, minimum) in integers.items():
            if type(value) is not int or value < minimum:
                raise InputError(
                    f"{name} of a DynamicEmbedding must be an integer of at least {minimum}. Received: {value!r}."
                )
        self.output_dim, self.admit_after, self.evict_after = output_dim, admit_after, evict_after
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self._rows_initializer = rows_initializer(self.embeddings_initializer)
        self.autocast = False
        self.supports_jit = False
        self.table: KeyedTable

    def build(self, input_shape: Any = None) -> None:
        """Creates an empty table. Raises `InputError` if the current strategy cannot train it."""
        strategy = strategy_in_use()
        if strategy and not strategy.supports_dynamic_embeddings:
            raise _not_trained(strategy.name)
        # This weight represents the rows in models and optimizers, and is not updated itself.
        self.embeddings = self.add_weight(shape=(1, self.output_dim), initializer="zeros", name="embeddings")
        table = KeyedRows(self.table_spec(), self.embeddings)
        self._index, self._rows = table.index, table.tables[0]  # attributes, so that Keras exports them
        self.table, self.gather = table, self._gather_without_strategy
        self.built = True

    def table_spec(self) -> TableSpec:
        """Returns the specification from which servers create the table."""
        shape, rule = (1, self.output_dim), (self.admit_after, self.evict_after)
        return TableSpec(self.embeddings.path, shape, self.variable_dtype, self._rows_initializer, rule)

    def _gather_without_strategy(self, keys: tf.Tensor) -> tf.Tensor:
        return self.table.lookup(keys)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the rows of keys, [..., output_dim]; keys may be ragged.

        Raises `InputError` if keys are neither integers nor strings, or if the current strategy cannot train the layer.
        """
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self.call(inputs.flat_values, training))
        inputs = tf.convert_to_tensor(inputs)
        _check_keys(inputs.dtype.name)
        if training and self.trainable and self.gather == self._gather_without_strategy:
            raise _not_trained("no strategy, or one that did not build the model")
        if inputs.dtype == tf.string:
            inputs = tf.strings.to_hash_bucket_fast(inputs, (1 << 63) - 1)
        return tf.cast(gather_shaped(self.gather, tf.cast(inputs, tf.int64)), self.compute_dtype)

    def compute_output_spec(self, inputs: Any, **_: Any) -> keras.KerasTensor:
        """Returns the shape and dtype of the output."""
        _check_keys(inputs.dtype)
        return keras.KerasTensor((*inputs.shape, self.output_dim), self.compute_dtype)

    def save_own_variables(self, store: Any) -> None:
        """Saves keys, rows, slots and counts."""
        super().save_own_variables(store)
        for name, array in self.table.export().items():
            store[name] = array

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` has saved."""
        self.embeddings.assign(store["0"])
        self.table.restore(store)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, with the initializer's seed, which Keras draws if it is not specified."""
        initializer = dict(self._rows_initializer)
        config = {"class_name": initializer.pop("name"), "config": initializer}
        integers = {name: getattr(self, name) for name in ("output_dim", "admit_after", "evict_after")}
        return {**super().get_config(), **integers, "embeddings_initializer": config}


def _check_keys(dtype: str) -> None:
    if dtype != "string" and not dtype.startswith(("int", "uint")):
        raise keras_internals.without_call_context(
            InputError(
                f'Keys of a DynamicEmbedding must be integers or strings. Received: {dtype}. Use keras.Input(dtype="int64").'
            )
        )


def _not_trained(received: str) -> Exception:
    return keras_internals.without_call_context(
        InputError(
            f"A DynamicEmbedding can be trained only with --strategy=parameter_server or single. Received: {received}. Use "
            "one of these strategies, or keras.layers.Embedding."
        )
    )
