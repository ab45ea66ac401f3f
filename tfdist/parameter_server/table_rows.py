"""The rows of embedding tables: which server has which of them, and what it does with its own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals

_BLOCK = 4 << 20  # bytes of a table that are read, written or drawn at a time


class TableForm(NamedTuple):
    """What a server needs to create its part of a table.

    Attributes:
      number: number of the table among the trained variables of the model.
      path: path of the variable.
      shape: shape of the whole table.
      dtype: name of its dtype.
      initializer: see `keras_internals.rows_initializer`; None if the values are written later.
      has_no_decay: whether it has no weight decay.
    """

    number: int
    path: str
    shape: tuple[int, int]
    dtype: str
    initializer: Mapping[str, Any] | None
    has_no_decay: bool


def split(ids: np.ndarray, servers: int) -> list[np.ndarray]:
    """Returns for each server the positions of its rows among `ids`.

    Row r is on server r % servers, where it is row r // servers: tables are often sorted by frequency, so that blocks would
    put all frequent rows on one server.
    """
    return [np.flatnonzero(ids % servers == server) for server in range(servers)]


def count_rows(rows: int, server: int, servers: int) -> int:
    """Returns how many of the rows of a table a server has."""
    return (rows - server + servers - 1) // servers


def blocks(shape: Sequence[int], dtype: Any) -> Iterator[tuple[int, int]]:
    """Yields the first row, a multiple of 4, and the row after the last of blocks of a table."""
    rows, width = shape
    size = max(_BLOCK // (width * tf.as_dtype(dtype).size) // 4 * 4, 4)
    for begin in range(0, rows, size):
        yield begin, min(begin + size, rows)


def summed(shares: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct ids of several shares, in order, and the sums of their rows, added in the order of the shares.

    Rows are summed before the optimizer, which is not linear: Keras's Adam would square them one by one.
    """
    ids, places = np.unique(np.concatenate([own for own, _ in shares]), return_inverse=True)
    rows = [own for _, own in shares]
    totals = np.zeros([len(ids), *rows[0].shape[1:]], rows[0].dtype)
    np.add.at(totals, places, np.concatenate(rows))
    return ids, totals


class TableRows:
    """A server's rows of a table and of the optimizer's slots for it.

    Attributes:
      variable: what the optimizer updates.
    """

    def __init__(self, form: TableForm, server: int, servers: int):
        """Creates the rows with their initial values; there are never two copies of them."""
        rows, width = count_rows(form.shape[0], server, servers), form.shape[1]
        self.variable = keras_internals.variable_at(form.path, tf.zeros([rows, width], form.dtype))
        self._stored = [keras_internals.value_of(self.variable)]
        self._in_use: list[tf.Variable] = []
        for begin, end in blocks(form.shape, form.dtype) if form.initializer else ():
            first = -(-(begin - server) // servers)  # own row of the first one in the block
            drawn = keras_internals.initial_rows(form.initializer or {}, form.shape, form.dtype, begin, end)
            own = drawn[first * servers + server - begin :: servers]
            # Not an assignment to a slice, which would copy all rows.
            self._stored[0].scatter_update(tf.IndexedSlices(own, np.arange(first, first + len(own))))

    def update_rows_in_use(self, slots: Sequence[keras.Variable]) -> dict[str, str]:
        """Lets the optimizer see only the rows that an update uses, and the slots of these.

        Args:
          slots: the optimizer's variables for this one.

        Returns:
          New keys of the variable for the optimizer, by old keys.
        """
        old = keras_internals.key_of(self.variable)
        for variable in (self.variable, *slots):
            stored = keras_internals.value_of(variable)
            name = stored.name.partition(":")[0]  # by which the optimizer decides about weight decay
            none = tf.zeros([0, stored.shape[1]], stored.dtype)
            used = tf.Variable(none, name=name, shape=[None, stored.shape[1]], trainable=stored.trainable)
            keras_internals.set_value(variable, used)
            self._in_use.append(used)
            self._stored += [] if variable is self.variable else [stored]
        return {old: keras_internals.key_of(self.variable)}

    def gradient(self, ids: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of `variable`, given that of some rows, after reading these; `assign` must follow."""
        for stored, used in zip(self._stored, self._in_use, strict=False):
            used.assign(tf.gather(stored, ids))
        return (
            rows if self._in_use else tf.scatter_nd(ids[:, tf.newaxis], rows, tf.cast(self._stored[0].shape, ids.dtype))
        )

    def assign(self, ids: tf.Tensor) -> None:
        """Stores the rows that the optimizer has updated."""
        for stored, used in zip(self._stored, self._in_use, strict=False):
            stored.scatter_update(tf.IndexedSlices(used, ids))
