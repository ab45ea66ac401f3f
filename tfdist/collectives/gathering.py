"""Gathers all replicas' rows on each replica, for all kinds of tensors that models accept and return."""

from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.dtype_casting import to_transferable
from tfdist.collectives.rows import any_rows


def gathered(rows: Any, collectives: Collectives) -> Any:
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
    found = collectives.all_gather(sent, name="rows") if sent else []
    arrived = iter([_of_form(value, part) for value, part in zip(found, sent, strict=True)])
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
