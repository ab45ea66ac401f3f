"""Count sketch: replicas sum small tables from which the largest elements of the reduced gradient are recovered."""

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.arguments import compile_with_xla, validate_integer
from tfdist.gradients.compression.random_draws import flip_signs, sign_bits
from tfdist.gradients.compression.reducers import Stochastic, finiteness_flag
from tfdist.gradients.compression.sparse_vector import pad_entries, sample_size, sampled_top_k, to_dense


class Sketch(Stochastic):
    """Finds the k elements that are largest in the sum over replicas, and sums those exactly.

        T_r,j = sum over replicas and over i with h_r(i) = j of s_r(i) x_i     (`rows` tables of `columns`, all-reduced)
        estimate_i = median over r of s_r(i) T_r,h_r(i);   C(x)_i = x_i if |estimate_i| is among the k largest, else 0

    A sketch is linear, so the sum of sketches is the sketch of the sum: unlike topk, it finds an element that is large
    only in the sum, and the bytes sent do not grow with N. Each estimate has an error of about |x| / sqrt(columns).
    Signs and hashes are redrawn at each step, the same on all replicas, from the message's name and a number of
    draws. h_r splits the vector into blocks of `columns` elements and rotates each by a random offset, so two elements
    collide with a probability of at most 1 / columns.

    Cost: 4 (rows columns + 1 + k) bytes, all-reduced in two messages (the 1 shows whether the tensor was finite). A
    vector of at most rows x columns elements is summed exactly. Experimental: sketching takes longer than any other
    method, about 10 ns per element and row.

    Charikar et al., Finding Frequent Items in Data Streams, 2002; Ivkin et al., Communication-efficient Distributed SGD
    with Sketching, 2019 (arXiv:1903.04488), whose second message is used here; Rothchild et al., FetchSGD, 2020
    (arXiv:2007.07682).
    """

    biased = True
    experimental = True

    def __init__(self, *, columns: int, rows: int = 5, k: int | None = None):
        """Validates and stores the parameters.

        Args:
          columns: columns of a table, up to 2**24.
          rows: number of tables, up to 99.
          k: number of elements sent, from 1 to columns; by default a tenth of columns.
        """
        self._columns = validate_integer("sketch", "columns", columns, 1, 2**24)
        self._rows = validate_integer("sketch", "rows", rows, 1, 99)
        self._k = validate_integer("sketch", "k", max(1, columns // 10) if k is None else k, 1, columns)

    def reduce_with_seed(
        self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """See base class. Sends two messages, or one if the vector is short."""
        size = x.shape[0]
        if size <= self._rows * self._columns:
            [total] = collectives.all_reduce([x], name=name)
            return total, x, total
        indices, check = self._find_largest(x, seed, collectives, name)
        values = tf.where(indices < 0, 0.0, tf.gather(x, tf.maximum(indices, 0)))
        [value_sums] = collectives.all_reduce([values], name=f"{name}/values")
        total, sent = (to_dense(indices[None], part[None], size) for part in (value_sums, values))
        return total, sent, check

    def _find_largest(
        self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the indices of the largest sums, [k] int32, negative if unused, and the sum of all finiteness flags, [1]."""
        size, blocks = x.shape[0], -(-x.shape[0] // self._columns)
        seeds = tf.random.split(seed, self._rows + 2)
        bits = tf.stack([sign_bits(blocks, self._columns, seeds[row]) for row in range(self._rows)])
        offsets = tf.random.stateless_uniform([self._rows, blocks], seeds[-2], 0, self._columns, tf.int32)
        static_arguments = (size, self._rows, self._columns)
        message = tf.concat(
            [compile_with_xla(_sketch, *static_arguments)(x, bits, offsets), finiteness_flag(x)[None]], axis=0
        )
        [total_message] = collectives.all_reduce([message], name=f"{name}/sketch")
        estimates = compile_with_xla(_estimates, *static_arguments)(total_message, bits, offsets)
        candidates = sampled_top_k(estimates, self._k, seeds[-1], sample_size(self._k / size))
        return pad_entries(candidates, self._k).indices, total_message[-1:]


def _sketch(size: int, rows: int, columns: int, x: tf.Tensor, bits: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Returns the concatenated tables, [rows columns]."""
    blocks = -(-size // columns)
    matrix = tf.reshape(tf.pad(x, [[0, blocks * columns - size]]), [blocks, columns])
    tables = []
    for row in range(rows):
        column_indices = (tf.range(columns)[None] + offsets[row][:, None]) % columns
        tables.append(tf.reduce_sum(tf.gather(flip_signs(matrix, bits[row]), column_indices, batch_dims=1), axis=0))
    return tf.concat(tables, axis=0)


def _estimates(size: int, rows: int, columns: int, tables: tf.Tensor, bits: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Returns the median of the rows' estimates of each element, [size]; not rounded, so equal on any hardware."""
    estimates = []
    for row in range(rows):
        column_indices = (tf.range(columns)[None] - offsets[row][:, None]) % columns
        table = tables[row * columns : (row + 1) * columns]
        estimates.append(tf.reshape(flip_signs(tf.gather(table, column_indices), bits[row]), [-1])[:size])
    return _median(estimates)


def _median(values: list[tf.Tensor]) -> tf.Tensor:
    """Returns the elementwise median of equally shaped tensors, by odd-even transposition sort."""
    sorted_values, count = list(values), len(values)
    for step in range(count):
        for i in range(step % 2, count - 1, 2):
            low, high = (
                tf.minimum(sorted_values[i], sorted_values[i + 1]),
                tf.maximum(sorted_values[i], sorted_values[i + 1]),
            )
            sorted_values[i], sorted_values[i + 1] = low, high
    return (sorted_values[(count - 1) // 2] + sorted_values[count // 2]) * 0.5
