"""Gathering of the rows of a global batch, of which each replica has a part; rows that do not count."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.differentiable import all_reduce, current, weighted
from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives, Op, to_transferable


def gather_rows(rows: tf.Tensor, name: str = "rows") -> tf.Tensor:
    """Returns the rows of all replicas, for a loss that compares the rows of a batch with each other; differentiable.

    In-batch negatives, contrastive losses, correlations over a batch and the like need all rows of a global batch,
    while each replica has computed only a part. In a `train_step`, a layer or a loss, gather what is compared, and
    compute either the loss of the whole batch, or that of this replica's rows against all others:

        embeddings = tfdist.gather_rows(self.encoder(images))

    On one device, and outside of a step on replicas, the rows are returned unchanged. Cost: one all-gather forward, one
    all-reduce of all rows backward.

    Args:
      rows: tensor [rows of this replica, ...], of a numeric or bool dtype; the number of rows may differ between
        replicas. Only floating-point rows have a gradient.
      name: names the call; the same on every replica, and unique within a step.

    Returns:
      Tensor [rows of the global batch, ...], in the order of the batch.
    """
    collectives, rows = current(), tf.convert_to_tensor(rows)
    if collectives.size == 1:
        return collectives.all_rows_of(rows, name)
    if not rows.dtype.is_floating:
        return gathered_rows(rows, collectives, name)
    [row_counts] = collectives.stack([tf.shape(rows)[0]], name=f"{name}/number")
    first, own_count = tf.reduce_sum(row_counts[: collectives.rank]), row_counts[collectives.rank]

    @tf.custom_gradient
    def gather_with_gradient(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            exact = to_transferable(upstream, collectives)
            return tf.cast(all_reduce(collectives, exact, name=f"{name}/gradient"), x.dtype)[first : first + own_count]

        return gathered_rows(tf.stop_gradient(x), collectives, name), weighted(gradient)

    return gather_with_gradient(rows[:own_count])  # none of a replica without rows in the batch


def gathered_rows(rows: tf.Tensor, collectives: Collectives, name: str) -> tf.Tensor:
    """Returns the rows of all replicas, of any dtype that can be cast to one that the engine gathers; without a gradient."""
    [whole] = collectives.all_gather([any_rows(to_transferable(rows, collectives))], name=name)
    return tf.cast(tf.ensure_shape(whole, [None, *rows.shape[1:]]), rows.dtype)


def any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Hides a tensor's static number of rows, so that all replicas trace the same function."""
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def gather_structure(rows: Any, collectives: Collectives) -> Any:
    """Returns all replicas' rows, in order; inside a replica function.

    Args:
      rows: structure of tensors whose first dim is this replica's rows, including string and ragged tensors; leaves may
        be None.
      collectives: collectives of all replicas.
    """
    if collectives.size == 1:
        return rows
    leaves = [leaf for leaf in tf.nest.flatten(rows) if leaf is not None]
    parts = [part for leaf in leaves for part in _parts(leaf, collectives)]
    sent = [any_rows(to_transferable(part, collectives)) for part in parts]
    received = collectives.all_gather(sent, name="rows") if sent else []
    arrived = iter([_of_form(value, part) for value, part in zip(received, sent, strict=True)])
    whole = iter([_whole(leaf, arrived) for leaf in leaves])
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(whole), rows)


def _of_form(value: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """Restores the shape of gathered rows, whose static shape an engine may have lost."""
    whole = tf.reshape(value, tf.concat([[-1], tf.shape(part)[1:]], 0))
    return tf.ensure_shape(whole, [None, *part.shape[1:]])


def _parts(leaf: Any, collectives: Collectives) -> list[tf.Tensor]:
    if isinstance(leaf, tf.RaggedTensor):
        return [part for inner in (leaf.values, leaf.row_lengths()) for part in _parts(inner, collectives)]
    if leaf.dtype != tf.string:
        return [leaf]
    lengths = tf.strings.length(leaf)
    longest = tf.reduce_max(tf.concat([[1], tf.reshape(lengths, [-1])], 0))
    [longest] = collectives.all_reduce([longest[None]], "max", name="rows/longest")
    return [tf.cast(tf.io.decode_raw(leaf, tf.uint8, fixed_length=longest[0]), tf.int32), lengths]


def _whole(leaf: Any, arrived: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        values = _whole(leaf.values, arrived)
        return tf.RaggedTensor.from_row_lengths(values, _whole(leaf.row_lengths(), arrived))
    if leaf.dtype != tf.string:
        return tf.cast(next(arrived), leaf.dtype)
    characters = tf.gather(tf.constant([bytes([number]) for number in range(256)]), next(arrived))
    padded = tf.strings.reduce_join(characters, axis=-1)
    return tf.strings.substr(padded, tf.zeros_like(lengths := next(arrived)), lengths)


def counting(collectives: Collectives, rows: tf.Tensor) -> Collectives:
    """Returns collectives for the code of a replica of which `rows` count; a single replica always has rows that do."""
    return collectives if collectives.size == 1 else CountedRows(collectives, rows > 0)


class CountedRows(ForwardingCollectives):
    """Collectives in which a replica without rows communicates what no rows at all would give.

    These are zeros in sums and stacks, the lowest number in maxima, and no rows in what is gathered. Messages, and what is
    sent by `broadcast` and `all_to_all`, are unchanged. Cost: a selection of each tensor.
    """

    def __init__(self, inner: Collectives, has_rows: tf.Tensor):
        """Wraps other collectives.

        Args:
          inner: collectives to which calls are forwarded.
          has_rows: scalar bool; whether what this replica computes counts.
        """
        super().__init__(inner)
        self._has_rows = has_rows

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return super().all_reduce(self._or_neutral(tensors, op), op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        counted = [tensor[: tf.where(self._has_rows, tf.shape(tensor)[0], 0)] for tensor in tensors]
        return super().all_gather(counted, name=name)

    def stack(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return super().stack(self._or_neutral(tensors, "sum"), name=name)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return super().reduce_scatter(self._or_neutral(tensors, op), op, name=name)

    def group(self, ranks: Sequence[int]) -> Collectives:
        """See base class."""
        return CountedRows(super().group(ranks), self._has_rows)

    def _or_neutral(self, tensors: Sequence[tf.Tensor], op: Op) -> list[tf.Tensor]:
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        return [tf.where(self._has_rows, x, _lowest(x.dtype) if op == "max" else tf.zeros([], x.dtype)) for x in inputs]


def _lowest(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(float("-inf") if dtype.is_floating else dtype.min, dtype)
