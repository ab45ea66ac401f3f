"""Random projections, the same on all replicas: random elements, sums with random signs, and count sketches."""

import abc
from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.arguments import (
    run_with_xla,
    selection_size,
    validate_flag,
    validate_integer,
    validate_ratio,
)
from tfdist.gradients.compression.random_draws import flip_signs, sign_bits
from tfdist.gradients.compression.reducers import VectorSum, Vectorwise, finiteness_flag
from tfdist.gradients.compression.sparse_vector import pad_entries, sample_size, sampled_top_k, to_dense


class _Projection(Vectorwise):
    """A random projection to k values, a fraction of the elements; the subclasses have the same constructor."""

    randomized = True
    experimental = True
    name: str

    def __init__(self, *, ratio: float, unbiased: bool = False):
        """Validates and stores the parameters.

        Args:
          ratio: k/n, in (0, 1].
          unbiased: whether C(x) is unbiased.
        """
        self._ratio = validate_ratio(self.name, ratio)
        self._unbiased = validate_flag(self.name, "unbiased", unbiased)
        self.biased = not unbiased

    def sum_vector(self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str) -> VectorSum:
        k = selection_size(self._ratio, x.shape[0])
        values, back_project = self._project(x, k, seed)
        [total_message] = collectives.all_reduce([tf.concat([values, finiteness_flag(x)[None]], axis=0)], name=name)
        return back_project(total_message[:k]), back_project(values), total_message[k:]

    @abc.abstractmethod
    def _project(self, x: tf.Tensor, k: int, seed: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """Returns the [k] values to sum over replicas, and the function that maps such values to a vector like `x`."""


class RandomK(_Projection):
    """Sends k random elements, k = max(1, round(ratio n)), the same on every replica.

        C(x)_i = x_i if i is drawn, else 0;   E |x - C(x)|^2 = (1 - k/n) |x|^2

    The vector is split into k parts of nearly equal length b, and one element of each is drawn: k distinct elements at
    the cost of k random numbers. The seed is derived from the message's name and the number of previous draws, so indices
    need not be sent.

    By default the values are sent unscaled and error feedback stores the others: over about n/k steps everything is
    sent. With `unbiased=True` each is multiplied by its b, so that E C(x) = x and no feedback is needed, but then E |x
    - C(x)|^2 = (n/k - 1) |x|^2: at ratio=0.01, the noise is ten times as large as the gradient.

    Cost: 4 (k + 1) bytes, all-reduced (the 1 shows whether the tensor was finite, even where it is not drawn).
    Experimental: at the same cost it trains less well than methods that look at the gradient.

    Stich et al., Sparsified SGD with Memory, 2018 (arXiv:1809.07599); Konecny et al., Federated Learning: Strategies
    for Improving Communication Efficiency, 2016 (arXiv:1610.05492).
    """

    name = "randomk"

    def _project(self, x: tf.Tensor, k: int, seed: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        size = x.shape[0]
        bounds = tf.range(k + 1, dtype=tf.int64) * size // k  # of the parts
        lengths = bounds[1:] - bounds[:-1]
        offsets = tf.math.floormod(tf.random.stateless_uniform([k], seed, None, None, tf.int64), lengths)
        indices, lengths = tf.cast(bounds[:-1] + offsets, tf.int32), tf.cast(lengths, tf.int32)
        values = tf.gather(x, indices) * (tf.cast(lengths, tf.float32) if self._unbiased else 1.0)
        return values, lambda values: to_dense(indices[None], values[None], size)


class Projection(_Projection):
    """Projects a vector onto k random directions, k = max(1, round(ratio n)).

        S [k, n]: S_ji = s_i if i mod k = j, else 0, with random signs s;   E[S^T S] = I
        y = sum over replicas of S x,   C(x) = S^T (S S^T)^-1 y = S^T y / b,   E |x - C(x)|^2 = (1 - k/n) |x|^2

    This is a row of a count sketch: each element is in one of k sums of b = n/k elements, which are as far apart as
    possible. The rows of S are orthogonal, so C is an orthogonal projection computed in one pass over the vector, and
    error feedback stores the component that is orthogonal to the random subspace. With `unbiased=True`, C(x) = S^T y and
    E C(x) = x, so no feedback is needed, but E |x - C(x)|^2 = (n/k - 1) |x|^2. The signs are derived from the message's
    name and the number of draws.

    Cost: 4 (k + 1) bytes, all-reduced (the 1 shows whether the tensor was finite). Experimental: it has the same
    error as randomk at the same cost.

    Charikar et al., Finding Frequent Items in Data Streams, 2002; Achlioptas, Database-friendly Random Projections,
    2003.
    """

    name = "projection"

    def _project(self, x: tf.Tensor, k: int, seed: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        size = x.shape[0]
        bits = sign_bits(-(-size // k), k, seed)
        unbiased = int(self._unbiased)
        return run_with_xla(_project, k, x, bits), lambda y: run_with_xla(_back_project, size, unbiased, y, bits)


def _project(k: int, x: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns S x, [k]."""
    return tf.reduce_sum(flip_signs(_rows_of(k, x), bits), axis=0)


def _rows_of(columns: int, x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.pad(x, [[0, -x.shape[0] % columns]]), [-1, columns])


def _back_project(size: int, unbiased: int, y: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns S^T y, [size], divided by the number of elements in each sum unless `unbiased`."""
    k = y.shape[0]
    rows = -(-size // k)
    full_sums = size - (rows - 1) * k  # number of sums with an element in the last row
    y = y if unbiased else y / tf.cast(tf.where(tf.range(k) < full_sums, rows, rows - 1), tf.float32)
    return tf.reshape(flip_signs(tf.broadcast_to(y, [rows, k]), bits), [-1])[:size]


class Sketch(Vectorwise):
    """Finds the k elements that are largest in the sum over replicas, and sums only these, exactly.

        T_r,j = sum over replicas and over i with h_r(i) = j of s_r(i) x_i     (`rows` tables of `columns`, all-reduced)
        estimate_i = median over r of s_r(i) T_r,h_r(i);   C(x)_i = x_i if |estimate_i| is among the k largest, else 0

    A sketch is linear, so the sum of sketches is the sketch of the sum: unlike topk, it finds an element that is large
    only in the sum, and the bytes sent do not grow with N. Each estimate has an error of about |x| / sqrt(columns).
    Signs and hashes are redrawn at each step, the same on all replicas, from the message's name and the number of
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
    randomized = True
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

    def sum_vector(self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str) -> VectorSum:
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
        message = tf.concat([run_with_xla(_sketch, x, bits, offsets), finiteness_flag(x)[None]], axis=0)
        [total_message] = collectives.all_reduce([message], name=f"{name}/sketch")
        estimates = run_with_xla(_estimates, size, total_message, bits, offsets)
        candidates = sampled_top_k(estimates, self._k, seeds[-1], sample_size(self._k / size))
        return pad_entries(candidates, self._k).indices, total_message[-1:]


def _sketch(x: tf.Tensor, bits: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Returns the concatenated tables, [rows columns], given signs [rows, words, columns] and offsets [rows, blocks]."""
    columns = bits.shape[2]
    matrix = _rows_of(columns, x)
    tables = []
    for row in range(offsets.shape[0]):
        column_indices = (tf.range(columns)[None] + offsets[row][:, None]) % columns
        tables.append(tf.reduce_sum(tf.gather(flip_signs(matrix, bits[row]), column_indices, batch_dims=1), axis=0))
    return tf.concat(tables, axis=0)


def _estimates(size: int, tables: tf.Tensor, bits: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Returns the median of the rows' estimates of each element, [size]; not rounded, so equal on any hardware."""
    columns = bits.shape[2]
    estimates = []
    for row in range(offsets.shape[0]):
        column_indices = (tf.range(columns)[None] - offsets[row][:, None]) % columns
        table = tables[row * columns : (row + 1) * columns]
        estimates.append(tf.reshape(flip_signs(tf.gather(table, column_indices), bits[row]), [-1])[:size])
    return _median(estimates)


def _median(values: list[tf.Tensor]) -> tf.Tensor:
    """Returns the elementwise median of equally shaped tensors, by odd-even transposition sort."""
    sorted_values, count = list(values), len(values)
    for step in range(count):
        for i in range(step % 2, count - 1, 2):
            pair = sorted_values[i : i + 2]
            sorted_values[i : i + 2] = tf.minimum(*pair), tf.maximum(*pair)
    return (sorted_values[(count - 1) // 2] + sorted_values[count // 2]) * 0.5
