"""The rows of embedding tables: how they are split over servers, and how a server updates its part."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals

_BLOCK_BYTES = 4 << 20  # bytes of a table that are read, written or drawn at a time


class TableForm(NamedTuple):
    """A description of a table, from which a server creates its part.

    Attributes:
      number: index of the table among the trained variables of the model.
      path: path of the variable.
      shape: shape of the whole table.
      dtype: name of its dtype.
      initializer: see `keras_internals.rows_initializer`; None if the values are written later.
      has_no_decay: whether it is excluded from weight decay.
    """

    number: int
    path: str
    shape: tuple[int, int]
    dtype: str
    initializer: Mapping[str, Any] | None
    has_no_decay: bool


def split(ids: np.ndarray, servers: int) -> list[np.ndarray]:
    """Returns, for each server, the positions of its rows in `ids`.

    Row r is row r // servers on server r % servers. With contiguous blocks, one server would have all frequent rows, because
    tables are often sorted by frequency.
    """
    return [np.flatnonzero(ids % servers == server) for server in range(servers)]


def count_rows(rows: int, server: int, servers: int) -> int:
    """Returns the number of a table's rows on a server."""
    return (rows - server + servers - 1) // servers


def blocks(shape: Sequence[int], dtype: Any) -> Iterator[tuple[int, int]]:
    """Yields [begin, end) of blocks of a table's rows; `begin` is a multiple of 4."""
    rows, width = shape
    size = max(_BLOCK_BYTES // (width * tf.as_dtype(dtype).size) // 4 * 4, 4)
    for begin in range(0, rows, size):
        yield begin, min(begin + size, rows)


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
      pull_counts: number of pulls of each row.
    """

    def __init__(self, form: TableForm, server: int, servers: int):
        """Creates the rows with their initial values, without a second copy of them."""
        rows, width = count_rows(form.shape[0], server, servers), form.shape[1]
        self.variable = keras_internals.variable_at(form.path, tf.zeros([rows, width], form.dtype))
        self._tables = [keras_internals.value_of(self.variable)]
        self._row_buffers: list[tf.Variable] = []
        self.pull_counts = np.zeros([rows], np.int32)
        for begin, end in blocks(form.shape, form.dtype) if form.initializer else ():
            first = -(-(begin - server) // servers)  # index on this server of its first row in the block
            block_rows = keras_internals.initial_rows(form.initializer or {}, form.shape, form.dtype, begin, end)
            local_rows = block_rows[first * servers + server - begin :: servers]
            # An assignment to a slice would copy all rows.
            self._tables[0].scatter_update(tf.IndexedSlices(local_rows, np.arange(first, first + len(local_rows))))

    def use(self) -> tuple[int, int, int]:
        """Returns the number of rows that were pulled, of their pulls, and of those of the most frequent 1% of all rows."""
        counts = self.pull_counts
        hot = max(len(counts) // 100, 1)
        return int(np.count_nonzero(counts)), int(counts.sum()), int(np.partition(counts, -hot)[-hot:].sum())

    def update_rows_in_use(self, slots: Sequence[keras.Variable]) -> dict[str, str]:
        """Replaces the table and its slots by variables that contain only the rows of an update.

        Args:
          slots: optimizer slots of the table.

        Returns:
          New keys of variables in the optimizer, by old keys.
        """
        old_key = keras_internals.key_of(self.variable)
        for variable in (self.variable, *slots):
            table = keras_internals.value_of(variable)
            name = table.name.partition(":")[0]  # the optimizer uses the name for weight decay
            no_rows = tf.zeros([0, table.shape[1]], table.dtype)
            buffer = tf.Variable(no_rows, name=name, shape=[None, table.shape[1]], trainable=table.trainable)
            keras_internals.set_value(variable, buffer)
            self._row_buffers.append(buffer)
            self._tables += [] if variable is self.variable else [table]
        return {old_key: keras_internals.key_of(self.variable)}

    def gradient(self, ids: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Reads rows, and returns the gradient of `variable` given theirs; `assign` must follow."""
        for table, buffer in zip(self._tables, self._row_buffers, strict=False):
            buffer.assign(tf.gather(table, ids))
        return (
            rows
            if self._row_buffers
            else tf.scatter_nd(ids[:, tf.newaxis], rows, tf.cast(self._tables[0].shape, ids.dtype))
        )

    def assign(self, ids: tf.Tensor) -> None:
        """Writes the updated rows to the table and its slots."""
        for table, buffer in zip(self._tables, self._row_buffers, strict=False):
            table.scatter_update(tf.IndexedSlices(buffer, ids))
