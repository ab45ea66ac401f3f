"""PowerSGD: approximates a matrix by the product of two thin factors, which can be all-reduced."""

import copy
import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.errors import InputError, is_integer
from tfdist.gradients.bucket import Bucketed
from tfdist.gradients.compression.arguments import run_with_xla
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.random_draws import normalize_rows, orthonormalize
from tfdist.gradients.compression.reducers import CodecReducer, reshape_like, seed_of
from tfdist.gradients.reducer import Reducer, ReductionResult, Sum, Tensors, split_at, tensor_specs


class PowerSGD(Reducer):
    """Sums matrices by one step of power iteration towards the `rank` strongest directions of their sum.

        P = orthonormal(sum over replicas of X Q),   Q' = sum over replicas of X^T P,   total = P Q'^T

    X [m, n] is a tensor whose dims except the last are flattened to rows. Q' becomes the next step's Q (warm start), so P
    approaches the strongest directions over the steps. A column that the matrices do not need, because they are zero or
    of lower rank, is zero in P and is redrawn at random in Q, from a seed that all replicas share.

    A replica's contribution to the total is P P^T X, a projection of its X. Error feedback stores the component that
    is orthogonal to P. The authors' code stores X - total / N instead. Its sum over replicas, and therefore the total, is
    the same, but the differences between replicas are neither sent nor discarded, and grow as a random walk.

    Cost: 4 rank (m + n) bytes (8 for float64), all-reduced in two messages: the factors P of all tensors of a call, then
    the Q'. If that is not less than the tensor, as for vectors, the first message contains the tensor itself, and its sum
    is exact. About three passes over the tensors, and three more for error feedback.

    An inf or NaN in a row of X also appears in that row of X Q (0 inf is NaN): the first message is a witness.

    Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, 2019
    (arXiv:1905.13727).
    """

    biased = True
    keeps_shapes = True
    packs = True

    def __init__(self, *, rank: int = 4):
        """Sets `rank`, the number of columns of the factors, at least 1."""
        if not is_integer(rank) or rank < 1:
            raise InputError(
                f"powersgd needs an integer rank of at least 1. Received: {rank!r}. Use rank=4, for example."
            )
        self._rank = int(rank)
        self._factors: Reducer = Bucketed(Sum())

    def then(self, codec: Codec) -> "PowerSGD":
        """Returns a copy whose messages are encoded by a codec; the part that the code omits counts as not sent."""
        result = copy.copy(self)
        result._factors = Bucketed(CodecReducer(codec))
        return result

    def is_exact(self, spec: tf.TensorSpec | tf.Tensor) -> bool:
        """Returns whether a tensor is summed exactly because its factors would not be smaller."""
        columns = spec.shape[-1] if spec.shape.rank else 1
        size = spec.shape.num_elements()
        # rank (m + n) against m n, both multiplied by n, which may be 0
        factors = self._rank * (size + columns * columns) * _compute_dtype(spec.dtype).size
        return factors >= size * columns * spec.dtype.size

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class. Returns the state of each matrix, Q as rows, then the states of the two messages."""
        factor_states = [self._factor_state(spec) for spec in specs if not self.is_exact(spec)]
        return factor_states + [state for message in self._messages(specs) for state in self._factors.state(message)]

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        lossy_indices = [i for i, tensor in enumerate(tensors) if not self.is_exact(tensor)]
        exact_indices = [i for i, tensor in enumerate(tensors) if self.is_exact(tensor)]
        previous_qs, message_state = split_at(state, len(lossy_indices))
        first_state, second_state = split_at(
            message_state, len(self._factors.state(self._messages(tensor_specs(tensors))[0]))
        )
        names = [f"{name}/{i}" for i in lossy_indices]

        wide = [tf.cast(tensors[i], _compute_dtype(tensors[i].dtype)) for i in lossy_indices]
        xs = [tf.reshape(x, [-1, x.shape[-1]]) for x in wide]
        products = [run_with_xla(_matmul_transposed, x, q) for x, q in zip(xs, previous_qs, strict=True)]
        first_message = [*products, *(tensors[i] for i in exact_indices)]
        first = self._factors.reduce(first_message, first_state, collectives, name=f"{name}/p")
        ps = [run_with_xla(_orthonormalize_columns, product) for product in first.totals[: len(lossy_indices)]]
        second_message = [run_with_xla(tf.matmul, p, x) for p, x in zip(ps, xs, strict=True)]
        second = self._factors.reduce(second_message, second_state, collectives, name=f"{name}/q")

        next_qs = [self._next_q(*pair) for pair in zip(second.totals, names, strict=True)]
        results: list[list[tf.Tensor]] = []
        for p_results, qs in ((first.totals, second.totals), (first.sent, second.sent)):
            lossy = [
                reshape_like(run_with_xla(tf.matmul, tf.transpose(p), q), tensors[i])
                for i, p, q in zip(lossy_indices, ps, qs, strict=True)
            ]
            by_index = dict(zip(lossy_indices + exact_indices, lossy + p_results[len(lossy_indices) :], strict=True))
            results.append([by_index[i] for i in range(len(tensors))])
        return ReductionResult(
            results[0], results[1], next_qs + first.state + second.state, first.witnesses + second.witnesses
        )

    def _messages(self, specs: Sequence[tf.TensorSpec]) -> tuple[list[tf.TensorSpec], list[tf.TensorSpec]]:
        """Returns the specs of the two messages: the Ps and the exact tensors, then the Qs, stored as rows."""
        ps, exact_specs, qs = [], [], []
        for spec in specs:
            if self.is_exact(spec):
                exact_specs.append(spec)
                continue
            columns, dtype = spec.shape[-1], _compute_dtype(spec.dtype)
            rows = spec.shape.num_elements() // columns
            ps.append(tf.TensorSpec([rows, self._rank], dtype, f"{spec.name}/p"))
            qs.append(tf.TensorSpec([self._rank, columns], dtype, f"{spec.name}/q"))
        return ps + exact_specs, qs

    def _factor_state(self, spec: tf.TensorSpec) -> State:
        shape = (self._rank, spec.shape[-1])
        initial = np.random.default_rng(zlib.crc32(spec.name.encode())).standard_normal(shape)
        return State(f"{spec.name}/q", shape, _compute_dtype(spec.dtype), per_replica=False, initial=initial)

    def _next_q(self, q: tf.Tensor, name: str) -> tf.Tensor:
        """Rescales Q's columns, whose norm is arbitrary, and redraws zero columns, which would stay zero forever."""
        is_used = tf.reduce_any(tf.not_equal(q, 0), axis=1, keepdims=True)
        drawn = tf.random.stateless_normal(q.shape, seed_of(name, 0, 0), dtype=q.dtype)
        return tf.where(is_used, normalize_rows(q), drawn)


# On CPUs, XLA multiplies a matrix and a thin factor up to twice as fast as the engine, unless the first one is transposed.
# It merges about sixty small operations of an orthonormalization into one call.


def _orthonormalize_columns(columns: tf.Tensor) -> tf.Tensor:
    """Orthonormalizes columns and returns them as rows."""
    return orthonormalize(tf.transpose(columns))


def _matmul_transposed(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.matmul(a, b, transpose_b=True)


def _compute_dtype(dtype: tf.DType) -> tf.DType:
    return tf.float64 if dtype == tf.float64 else tf.float32
