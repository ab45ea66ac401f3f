"""Gathers the rows of a global batch from all replicas, and masks replicas without rows."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.differentiable import all_reduce, current, weight_gradient
from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives, to_transferable


def gather_rows(rows: tf.Tensor, name: str = "rows") -> tf.Tensor:
    """Returns the rows of all replicas, for losses that compare the rows of a batch; differentiable.

    In-batch negatives, contrastive losses, correlations over a batch and similar losses need all rows of a global batch,
    while each replica has only some of them. In a `train_step`, a layer or a loss, gather the rows and compute either the
    loss of the whole batch, or the loss of this replica's rows compared with all rows:

        embeddings = tfdist.gather_rows(self.encoder(images))

    On one device, and outside of a step on replicas, the rows are returned unchanged. Cost: one all-gather forward, one
    all-reduce of all rows backward.

    Args:
      rows: tensor [rows of this replica, ...], of a numeric or bool dtype; the number of rows may differ between
        replicas. Only floating-point rows have a gradient.
      name: name of the call; the same on every replica, and unique within a step.

    Returns:
      Tensor [rows of the global batch, ...], in the order of the batch.
    """
    collectives, rows = current(), tf.convert_to_tensor(rows)
    if collectives.size == 1:
        return collectives.all_rows_of(rows, name)
    if not rows.dtype.is_floating:
        return gather_any_rows(rows, collectives, name)
    [row_counts] = collectives.stack([tf.shape(rows)[0]], name=f"{name}/number")
    start, count = tf.reduce_sum(row_counts[: collectives.rank]), row_counts[collectives.rank]

    @tf.custom_gradient
    def gather_with_gradient(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            value = to_transferable(upstream, collectives)
            return tf.cast(all_reduce(collectives, value, name=f"{name}/gradient"), x.dtype)[start : start + count]

        return gather_any_rows(tf.stop_gradient(x), collectives, name), weight_gradient(gradient)

    return gather_with_gradient(rows[:count])  # empty on a replica without rows in the batch


def gather_any_rows(rows: tf.Tensor, collectives: Collectives, name: str) -> tf.Tensor:
    """Returns the rows of all replicas, of any dtype that can be cast to one that the engine gathers; no gradient."""
    [all_rows] = collectives.all_gather([hide_row_count(to_transferable(rows, collectives))], name=name)
    return tf.cast(tf.ensure_shape(all_rows, [None, *rows.shape[1:]]), rows.dtype)


def hide_row_count(tensor: tf.Tensor) -> tf.Tensor:
    """Hides a tensor's static number of rows, which makes the traces of all replicas equal."""
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def gather_structure(rows: Any, collectives: Collectives) -> Any:
    """Returns the rows of all replicas, in order; call it in a replica function.

    `rows` is a structure of tensors, including string and ragged tensors, whose first dim is this replica's rows; leaves may
    be None.
    """
    if collectives.size == 1:
        return rows
    leaves = [leaf for leaf in tf.nest.flatten(rows) if leaf is not None]
    parts = [part for leaf in leaves for part in _parts(leaf, collectives)]
    gathered_parts = iter([gather_any_rows(part, collectives, f"rows/{i}") for i, part in enumerate(parts)])
    results = iter([_join_parts(leaf, gathered_parts) for leaf in leaves])
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(results), rows)


def _parts(leaf: Any, collectives: Collectives) -> list[tf.Tensor]:
    if isinstance(leaf, tf.RaggedTensor):
        return [part for inner in (leaf.values, leaf.row_lengths()) for part in _parts(inner, collectives)]
    if leaf.dtype != tf.string:
        return [leaf]
    lengths = tf.strings.length(leaf)
    max_length = tf.reduce_max(tf.concat([[1], tf.reshape(lengths, [-1])], 0))
    [max_length] = collectives.all_reduce([max_length[None]], "max", name="rows/longest")
    return [tf.cast(tf.io.decode_raw(leaf, tf.uint8, fixed_length=max_length[0]), tf.int32), lengths]


def _join_parts(leaf: Any, gathered_parts: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        values = _join_parts(leaf.values, gathered_parts)
        return tf.RaggedTensor.from_row_lengths(values, _join_parts(leaf.row_lengths(), gathered_parts))
    if leaf.dtype != tf.string:
        return tf.cast(next(gathered_parts), leaf.dtype)
    characters = tf.gather(tf.constant([bytes([number]) for number in range(256)]), next(gathered_parts))
    padded_strings = tf.strings.reduce_join(characters, axis=-1)
    return tf.strings.substr(padded_strings, tf.zeros_like(lengths := next(gathered_parts)), lengths)


def mask_if_empty(collectives: Collectives, rows: tf.Tensor) -> Collectives:
    """Masks the collectives of a replica if it has no rows. Does nothing for a single replica, which always has rows."""
    return collectives if collectives.size == 1 else MaskedCollectives(collectives, rows > 0)


class MaskedCollectives(ForwardingCollectives):
    """Collectives in which a replica without rows contributes neutral elements.

    Neutral elements are zeros in sums and stacks, the lowest number in maxima, and no rows in gathers. Messages, `broadcast`
    and `all_to_all` are unchanged. Cost: one `tf.where` or slice of each tensor.
    """

    def __init__(self, inner: Collectives, has_rows: tf.Tensor):
        """Wraps other collectives; `has_rows` is a scalar bool, whether this replica has rows."""
        super().__init__(inner)
        self._has_rows = has_rows

    def group(self, ranks: Sequence[int]) -> Collectives:
        return MaskedCollectives(super().group(ranks), self._has_rows)

    def _forward(self, operation: str, tensors: Sequence[tf.Tensor], *args: Any, **options: Any) -> list[tf.Tensor]:
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if operation == "all_gather":
            inputs = [x[: tf.where(self._has_rows, tf.shape(x)[0], 0)] for x in inputs]
        elif operation in ("all_reduce", "reduce_scatter", "stack"):
            is_maximum = args[:1] == ("max",)
            neutral = [_lowest(x.dtype) if is_maximum else tf.zeros([], x.dtype) for x in inputs]
            inputs = [tf.where(self._has_rows, x, element) for x, element in zip(inputs, neutral, strict=True)]
        return super()._forward(operation, inputs, *args, **options)


def _lowest(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(float("-inf") if dtype.is_floating else dtype.min, dtype)
