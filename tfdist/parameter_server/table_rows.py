"""Splits the rows of embedding tables over servers, and updates a server's part of them."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals

_BLOCK_BYTES = 4 << 20  # bytes of a table that are read, written or drawn at a time
_MAX_MEMORY_BYTES = 64 << 20  # larger tables are read into a file


class TableSpec(NamedTuple):
    """A description of a table, from which a server creates its part."""

    path: str  # path of the variable
    shape: tuple[int, int]  # shape of the whole table
    dtype: str  # name of the dtype
    # See `keras_internals.rows_initializer`; None if the values are written later.
    initializer: Mapping[str, Any] | None
    # `admit_after` and `evict_after` of a table with a row per key, see `KeyedRows`; None for a table indexed by row.
    rule: tuple[int, int] | None = None


def mix64(values: np.ndarray) -> np.ndarray:
    """Returns a bijective hash of each integer, uint64: the finalizer of SplitMix64 (Steele et al., 2014)."""
    values = np.asarray(values).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split(ids: np.ndarray, servers: int, by_key: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, for each server, the positions of its rows in `ids`, and their ids on the server.

    Row r is row r // servers on server r % servers. With contiguous blocks, one server would have all frequent rows, because
    tables are often sorted by frequency. The server of a key is its hash modulo `servers`, because keys may have a pattern.
    """
    places = mix64(ids) % np.uint64(servers) if by_key else ids % servers
    positions = [np.flatnonzero(places == server) for server in range(servers)]
    return [(own, ids[own] if by_key else (ids[own] // servers).astype(np.int32)) for own in positions]


def count_rows(rows: int, server: int, servers: int) -> int:
    """Returns the number of a table's rows on a server."""
    return (rows - server + servers - 1) // servers


def blocks(shape: Sequence[int], dtype: Any) -> Iterator[tuple[int, int]]:
    """Yields the ranges [begin, end) of blocks of a table's rows; `begin` is a multiple of 4."""
    rows, width = shape
    size = max(_BLOCK_BYTES // (width * tf.as_dtype(dtype).size) // 4 * 4, 4)
    for begin in range(0, rows, size):
        yield begin, min(begin + size, rows)


def read_in_blocks(shape: Sequence[int], dtype: Any, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Returns an array of which `read` returns the rows [begin, end), as a memory-mapped file if it is large."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    is_small = count <= _MAX_MEMORY_BYTES
    value = np.empty(shape, dtype) if is_small else np.memmap(tempfile.TemporaryFile(), dtype, shape=tuple(shape))
    for begin, end in blocks(shape, dtype):
        value[begin:end] = read(begin, end)
        if isinstance(value, np.memmap):
            value.flush()  # so that the system may reclaim the memory
    return value


def growing_variable(rows: tf.Tensor, *, trainable: bool = False, name: str | None = None) -> tf.Variable:
    """Creates a variable with these rows whose number of rows may change."""
    return tf.Variable(rows, shape=[None, rows.shape[1]], trainable=trainable, name=name)


def sum_rows(shares: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Sums the rows of several shares by id, in the order of the shares; returns sorted, distinct ids and the sums.

    Rows must be summed before the optimizer, which is not linear. The ids of a share are sorted and distinct.
    """
    if len(shares) == 1:
        return shares[0]
    ids, positions = np.unique(np.concatenate([share_ids for share_ids, _ in shares]), return_inverse=True)
    rows = [share_rows for _, share_rows in shares]
    totals = np.zeros([len(ids), *rows[0].shape[1:]], rows[0].dtype)
    np.add.at(totals, positions, np.concatenate(rows))
    return ids, totals


class TableRows:
    """A server's rows of a table and of its optimizer slots.

    Attributes:
      variable: the variable that the optimizer updates.
      tables: the TensorFlow variables of the table and, after `set_slots`, of its slots.
      pull_counts: number of pulls of each row.
    """

    def __init__(self, spec: TableSpec, server: int, servers: int):
        """Creates the rows with their initial values, without a second copy of them."""
        rows, width = count_rows(spec.shape[0], server, servers), spec.shape[1]
        self.variable = keras_internals.variable_at(spec.path, tf.zeros([rows, width], spec.dtype))
        self.tables = [keras_internals.value_of(self.variable)]
        self._updated_variables: list[keras.Variable] = []
        self._buffers: list[tf.Variable] = []
        self.pull_counts = np.zeros([rows], np.int32)
        for begin, end in blocks(spec.shape, spec.dtype) if spec.initializer else ():
            first = -(-(begin - server) // servers)  # index on this server of its first row in the block
            block_rows = keras_internals.initial_rows(spec.initializer or {}, spec.shape, spec.dtype, begin, end)
            local_rows = block_rows[first * servers + server - begin :: servers]
            # An assignment to a slice would copy all rows.
            self.tables[0].scatter_update(tf.IndexedSlices(local_rows, np.arange(first, first + len(local_rows))))

    def usage(self) -> tuple[int, int, int]:
        """Returns the number of rows that were pulled, of all pulls, and of pulls of the most frequent 1% of all rows."""
        counts = self.pull_counts
        hot = max(len(counts) // 100, 1)
        return int(np.count_nonzero(counts)), int(counts.sum()), int(np.partition(counts, -hot)[-hot:].sum())

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Returns the positions of rows in `tables`."""
        return ids

    def read_rows(self, ids: np.ndarray, index: int = 0) -> np.ndarray:
        """Returns rows of the table, if `index` is 0, or of one of its slots."""
        return np.asarray(tf.gather(self.tables[index], self.positions(ids)))

    def write_rows(self, ids: np.ndarray, rows: np.ndarray, index: int = 0) -> None:
        """Assigns rows of the table, if `index` is 0, or of one of its slots; a slot that does not exist is ignored."""
        for table in self.tables[index : index + 1]:
            table.scatter_update(tf.IndexedSlices(rows, self.positions(ids)))

    def pull(self, ids: np.ndarray) -> np.ndarray:
        """Returns the rows with these ids, which are distinct, for a training step."""
        self.pull_counts[ids] += 1
        return np.asarray(tf.gather(self.tables[0], ids))

    def set_slots(self, slots: Sequence[keras.Variable], *, lazy: bool) -> None:
        """Sets the optimizer slots of the table.

        With `lazy`, an update changes only the rows in use, in buffers that take the place of the table and of its slots.
        """
        self.tables[1:] = map(keras_internals.value_of, slots)
        self._updated_variables = [self.variable, *slots] if lazy else []
        for table in map(keras_internals.value_of, self._updated_variables):
            name = table.name.partition(":")[0]  # the optimizer uses the name for weight decay
            buffer = growing_variable(tf.zeros([0, table.shape[1]], table.dtype), name=name, trainable=table.trainable)
            buffer._unique_id = table._unique_id  # by which the optimizer finds its slots
            self._buffers.append(buffer)

    @contextlib.contextmanager
    def updating(self, ids: tf.Tensor, rows: tf.Tensor) -> Iterator[tf.Tensor]:
        """Context for an update by the optimizer; yields the gradient of `variable`, given those of rows with distinct ids."""
        if not self._buffers:
            yield tf.scatter_nd(ids[:, tf.newaxis], rows, tf.cast(self.tables[0].shape, ids.dtype))
            return
        positions, rows = self._begin_update(ids, rows)
        for table, buffer in zip(self.tables, self._buffers, strict=True):
            buffer.assign(tf.gather(table, positions))
        with keras_internals.values_replaced(self._updated_variables, self._buffers):
            yield rows
        for table, buffer in zip(self.tables, self._buffers, strict=True):
            table.scatter_update(tf.IndexedSlices(buffer, positions))

    def _begin_update(self, ids: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the positions of the rows to update, and their gradients."""
        return ids, rows
