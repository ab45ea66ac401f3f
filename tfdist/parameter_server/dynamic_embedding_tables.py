"""Embedding tables with a row per key, created when the key occurs, on servers or in the process of a single device."""

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.parameter_server.table_rows import TableRows, TableSpec, blocks, growing_variable, mix64, read_in_blocks

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # increment of SplitMix64
_INITIALIZERS = (
    keras.initializers.RandomUniform,
    keras.initializers.RandomNormal,
    keras.initializers.Zeros,
    keras.initializers.Constant,
)


def rows_initializer(initializer: keras.Initializer) -> Mapping[str, Any]:
    """Returns the argument of `initial_rows` for a Keras initializer, including the seed that Keras drew if none was passed.

    Raises:
      InputError: the initializer is not supported.
    """
    config = initializer.get_config() if type(initializer) in _INITIALIZERS else {}
    if type(initializer) not in _INITIALIZERS or not isinstance(config.get("value", 0), int | float):
        raise InputError(
            "The rows of a DynamicEmbedding are drawn by key: its initializer must be one of Keras's "
            f"{', '.join(kind.__name__ for kind in _INITIALIZERS)}. Received: {type(initializer).__name__}. Use one of them."
        )
    seed = getattr(initializer, "seed", None)
    return {"name": type(initializer).__name__, **config, **({} if seed is None else {"seed": seed})}


def initial_rows(initializer: Mapping[str, Any], keys: np.ndarray, width: int, dtype: Any) -> np.ndarray:
    """Returns the initial rows of int64 keys, [keys, width], which depend only on the seed and the key.

    `initializer` is a result of `rows_initializer`.
    """
    shape, name = (len(keys), width), initializer["name"]
    if name in ("Zeros", "Constant"):
        return np.full(shape, initializer.get("value", 0.0), dtype)
    seed = np.array([initializer["seed"] % (1 << 64)], np.uint64)
    streams = mix64(mix64(keys) + mix64(seed + _GOLDEN))[:, np.newaxis]
    columns = np.arange(1, (width if name == "RandomUniform" else 2 * width) + 1, dtype=np.uint64)
    uniform = (mix64(streams + _GOLDEN * columns) >> np.uint64(11)) * 2.0**-53
    if name == "RandomUniform":
        rows = initializer["minval"] + (initializer["maxval"] - initializer["minval"]) * uniform
    else:  # Box and Muller (1958)
        normal = np.sqrt(-2 * np.log1p(-uniform[:, :width])) * np.cos(2 * np.pi * uniform[:, width:])
        rows = initializer["mean"] + initializer["stddev"] * normal
    return rows.astype(dtype)


class KeyedTable(abc.ABC):
    """A table with a row per key, or a worker's access to such a table on servers.

    Attributes:
      shape: [1, width], the shape of the variable that stands for the table in models and optimizers.
      dtype: dtype of the rows.
    """

    shape: tf.TensorShape
    dtype: tf.DType

    def check(self, ids: np.ndarray) -> np.ndarray:
        """Returns the ids, all of which are valid."""
        return ids

    @abc.abstractmethod
    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns rows outside of training steps, [keys, width]; zeros for keys without a row."""

    @abc.abstractmethod
    def read_keys(self) -> tuple[np.ndarray, ...]:
        """Returns the keys.

        Returns:
          Keys with a row and the index of the update that used them last, int64 [keys, 2]; keys without a row, their counts
          and the same index, int64 [keys, 3]; and the number of updates so far and of tables, including optimizer slots.
        """

    @abc.abstractmethod
    def write_keys(self, keys: np.ndarray, candidates: np.ndarray, counts: np.ndarray) -> None:
        """Replaces all keys with results of `read_keys`, and rows with initial rows. A new table gets as many slots."""

    @abc.abstractmethod
    def read_rows(self, keys: np.ndarray, index: int = 0) -> np.ndarray:
        """Returns rows of the table, if `index` is 0, or of one of its slots; see `lookup`."""

    @abc.abstractmethod
    def write_rows(self, keys: np.ndarray, rows: np.ndarray, index: int = 0) -> None:
        """Assigns rows to keys that have a row; see `TableRows.write_rows`."""

    def export(self) -> dict[str, np.ndarray]:
        """Returns the arrays that `restore` needs, sorted by key; large arrays are memory-mapped files."""
        keys, candidates, (updates, count) = self.read_keys()
        keys, candidates = keys[np.argsort(keys[:, 0])], candidates[np.argsort(candidates[:, 0])]
        arrays = {"keys": keys, "candidates": candidates, "updates": np.array([updates])}
        shape, dtype = (len(keys), self.shape[1]), self.dtype.as_numpy_dtype
        for number in range(count):
            read = functools.partial(lambda number, begin, end: self.read_rows(keys[begin:end, 0], number), number)
            arrays[f"rows_{number}"] = read_in_blocks(shape, dtype, read)
        return arrays

    def restore(self, arrays: Mapping[str, Any], *, with_slots: bool = True) -> None:
        """Replaces all keys and rows with the arrays of `export`, which may be read from a file when they are sliced."""
        keys, candidates, updates = (np.asarray(arrays[name][:]) for name in ("keys", "candidates", "updates"))
        count = sum(f"rows_{number}" in arrays for number in range(len(arrays))) if with_slots else 1
        self.write_keys(keys, candidates, np.array([updates[0], count]))
        for number in range(count):
            for begin, end in blocks((len(keys), self.shape[1]), self.dtype):
                self.write_rows(keys[begin:end, 0], np.asarray(arrays[f"rows_{number}"][begin:end]), number)


class KeyedRows(TableRows, KeyedTable):
    """Rows by key, with their optimizer slots, in memory that doubles as keys are admitted.

    A key is counted once in each update whose batch contains it. When its count reaches `admit_after`, the update creates its
    row and trains it. Gradients of earlier updates are dropped, as by the counter filter of DeepRec. Every `evict_after`
    updates, keys that were not used in the last `evict_after` updates are removed. Rows depend only on the order of updates.

    Position 0 of the tables is for keys without a row: zeros in the table, and initial values in the slots.

    Attributes:
      index: hash table of the positions of keys.
    """

    def __init__(self, spec: TableSpec, variable: keras.Variable | None = None):
        """Creates an empty table of the shape [1, width], whose initializer is a result of `rows_initializer`.

        `variable` is the variable that the optimizer updates; by default a new one.
        """
        assert spec.rule and spec.initializer
        no_row = tf.zeros(spec.shape, spec.dtype)
        self.variable = keras_internals.variable_at(spec.path, no_row) if variable is None else variable
        self.shape, self.dtype = no_row.shape, no_row.dtype
        self._initializer, (self._admit_after, self._evict_after) = spec.initializer, spec.rule
        self._updated_variables, self._buffers = [], []
        self.tables = [growing_variable(no_row)]
        self.index = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        self._candidates = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, [0, 0])
        self.write_keys(np.zeros([0, 2], np.int64), np.zeros([0, 3], np.int64), np.array([0, 1]))

    def usage(self) -> tuple[int, int, int]:
        """Returns the number of keys with a row, of keys that are only counted, and of evicted rows."""
        return int(self.index.size()), int(self._candidates.size()), self._evicted

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """See base class; 0 for keys without a row."""
        return self.index.lookup(tf.constant(ids, tf.int64)).numpy()

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.gather(self.tables[0], self.index.lookup(keys)), [None, self.shape[1]])

    def pull(self, ids: np.ndarray) -> np.ndarray:
        """See base class. A key that the next update admits already has its initial row."""
        positions = self.positions(ids)
        rows = np.array(tf.gather(self.tables[0], positions))
        new = np.flatnonzero(positions == 0)
        new = new[self._next_counts(ids[new]) >= self._admit_after]
        rows[new] = self._initial_rows(ids[new])
        return rows

    def set_slots(self, slots: Sequence[keras.Variable], *, lazy: bool = True, keeps_slots: bool = False) -> None:
        """See base class. All updates are lazy. With `keeps_slots`, slots restored from the same optimizer are kept."""
        restored = self.tables[1:]
        super().set_slots(slots, lazy=True)
        if keeps_slots and len(restored) == len(slots):
            self.tables[1:] = restored
            for table, slot in zip(restored, slots, strict=True):
                table.scatter_update(tf.IndexedSlices(keras_internals.value_of(slot), [0]))
            return
        capacity = len(self._last_use)
        self.tables[1:] = [growing_variable(tf.repeat(keras_internals.value_of(slot), capacity, 0)) for slot in slots]

    def read_keys(self) -> tuple[np.ndarray, ...]:
        keys, positions = (part.numpy() for part in self.index.export())
        candidates, counts = (part.numpy() for part in self._candidates.export())
        columns = (candidates[:, np.newaxis], counts.reshape(-1, 2))
        numbers = np.array([self._updates, len(self.tables)])
        return np.stack([keys, self._last_use[positions]], 1), np.hstack(columns), numbers

    def write_keys(self, keys: np.ndarray, candidates: np.ndarray, counts: np.ndarray) -> None:
        if not self._buffers:  # the optimizer is not known yet
            no_row = tf.zeros(self.shape, self.dtype)
            self.tables = [self.tables[0], *(growing_variable(no_row) for _ in range(counts[1] - 1))]
        for table in self.tables:
            table.assign(tf.gather(table, [0]))
        for table in (self.index, self._candidates):  # traced functions look up in them
            table.remove(table.export()[0])
        self._candidates.insert(candidates[:, 0], candidates[:, 1:])
        self._last_use, self._free = np.zeros([1], np.int64), np.zeros([0], np.int64)  # by position; positions
        self._updates, self._evicted = int(counts[0]), 0
        positions = self._add(keys[:, 0])
        self._last_use[positions] = keys[:, 1]

    def _begin_update(self, ids: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See base class. Counts, admits and evicts keys."""
        positions, rows = tf.numpy_function(self._count, [ids, rows], [tf.int64, rows.dtype])
        return tf.ensure_shape(positions, [None]), tf.ensure_shape(rows, [None, self.shape[1]])

    def _count(self, keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._updates += 1
        positions = self.positions(keys)
        new = np.flatnonzero(positions == 0)
        counts = self._next_counts(keys[new])
        is_admitted = counts >= self._admit_after
        admitted, others = new[is_admitted], new[~is_admitted]
        self._candidates.remove(keys[admitted])
        last_use = np.full([len(others)], self._updates)
        self._candidates.insert(keys[others], np.stack([counts[~is_admitted], last_use], 1))
        positions[admitted] = self._add(keys[admitted])
        has_row = positions > 0
        self._last_use[positions[has_row]] = self._updates
        if self._evict_after and self._updates % self._evict_after == 0:
            self._evict(self._updates - self._evict_after)
        return positions[has_row], rows[has_row]

    def _next_counts(self, keys: np.ndarray) -> np.ndarray:
        return self._candidates.lookup(tf.constant(keys, tf.int64)).numpy().reshape(-1, 2)[:, 0] + 1

    def _initial_rows(self, keys: np.ndarray) -> np.ndarray:
        return initial_rows(self._initializer, keys, self.shape[1], self.dtype.as_numpy_dtype)

    def _add(self, keys: np.ndarray) -> np.ndarray:
        """Creates rows for keys without one; returns their positions."""
        capacity, missing = len(self._last_use), len(keys) - len(self._free)
        if missing > 0:
            added = max(capacity, missing)
            for table in self.tables:
                table.assign(tf.pad(table, [[0, added], [0, 0]]))
            self._last_use = np.concatenate([self._last_use, np.zeros([added], np.int64)])
            self._free = np.concatenate([self._free, np.arange(capacity, capacity + added)])
        positions, self._free = self._free[: len(keys)], self._free[len(keys) :]
        self.index.insert(tf.constant(keys, tf.int64), positions)
        self.tables[0].scatter_update(tf.IndexedSlices(self._initial_rows(keys), positions))
        for table in self.tables[1:]:  # a slice would copy the table
            table.scatter_update(tf.IndexedSlices(tf.gather(table, np.zeros_like(positions)), positions))
        return positions

    def _evict(self, last_use: int) -> None:
        """Removes the keys whose last use is not after update `last_use`."""
        keys, positions = (part.numpy() for part in self.index.export())
        is_old = self._last_use[positions] <= last_use
        self.index.remove(keys[is_old])
        self._free = np.concatenate([self._free, positions[is_old]])
        self._evicted += int(is_old.sum())
        candidates, counts = (part.numpy() for part in self._candidates.export())
        self._candidates.remove(candidates[counts.reshape(-1, 2)[:, 1] <= last_use])


def keyed_layers(model: keras.Model) -> list[Any]:
    """Returns the layers of a model with a row per key: `tfdist.layers.DynamicEmbedding`."""
    return [
        layer for layer in keras_internals.layers_of(model) if isinstance(getattr(layer, "table", None), KeyedTable)
    ]
