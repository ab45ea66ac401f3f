"""Gradient accumulation: a replica's rows are split into micro-steps, whose gradients are summed before reduction."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import InputError

# (rows of a micro-step) -> (gradients, loss)
Differentiate = Callable[[Any], tuple[list[tf.Tensor], tf.Tensor]]


def accumulated(
    differentiate: Differentiate,
    batch: Any,
    micro_steps: int,
    shapes: Sequence[tf.TensorSpec],
    dtype: tf.DType,
    parts: int = 0,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Adds gradients and losses over consecutive micro-steps, so that the activations of only one are in memory.

    Rows are divided among micro-steps as evenly as possible. The compiled graph contains one micro-step in a loop,
    whatever their number.

    Args:
      differentiate: returns the dense gradients and the loss of some rows; must not communicate.
      batch: structure of tensors, whose first dim is this replica's rows, at least 1.
      micro_steps: number of micro-steps, at least 2; with fewer rows than that, one per row.
      shapes: shapes and dtypes of the gradients.
      dtype: dtype of the loss.
      parts: number of devices over which rows are sharded, or 0; each micro-step then takes an equal share of each
        shard. The micro-steps are then unrolled, because DTensor intermittently mixes up the bodies of loops, and
        rejects them.

    Returns:
      The sums of the gradients and of the losses.
    """
    if parts:
        return _unrolled(differentiate, _shares_of_parts(batch, micro_steps, parts), micro_steps)
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    # The last batch of a pass may have fewer rows than there are micro-steps.
    used = tf.minimum(micro_steps, rows)
    part = _successive_rows(batch, micro_steps, rows, used)

    def body(number: tf.Tensor, gradients: list[tf.Tensor], loss: tf.Tensor) -> tuple[Any, ...]:
        part_gradients, part_loss = differentiate(part(number))
        return number + 1, [a + b for a, b in zip(gradients, part_gradients, strict=True)], loss + part_loss

    zeros = [tf.zeros(spec.shape, spec.dtype) for spec in shapes]
    _, gradients, loss = tf.while_loop(
        lambda number, *_: number < used,
        body,
        (tf.constant(0), zeros, tf.zeros([], dtype)),
        parallel_iterations=1,
        maximum_iterations=micro_steps,
    )
    return gradients, loss


def _unrolled(
    differentiate: Differentiate, part: Callable[[int], Any], micro_steps: int
) -> tuple[list[tf.Tensor], tf.Tensor]:
    gradients, loss = differentiate(part(0))
    for number in range(1, micro_steps):
        part_gradients, part_loss = differentiate(part(number))
        gradients, loss = [a + b for a, b in zip(gradients, part_gradients, strict=True)], loss + part_loss
    return gradients, loss


def _successive_rows(batch: Any, micro_steps: int, rows: tf.Tensor, used: tf.Tensor) -> Callable[[tf.Tensor], Any]:
    static = tf.nest.flatten(batch)[0].shape[0]
    equal = static // micro_steps if static is not None and static % micro_steps == 0 else None

    def part(number: tf.Tensor) -> Any:
        start, end = number * rows // used, (number + 1) * rows // used
        cut = tf.nest.map_structure(lambda x: x[start:end], batch)
        return tf.nest.map_structure(lambda x: tf.ensure_shape(x, [equal, *x.shape[1:]]), cut)

    return part


def _shares_of_parts(batch: Any, micro_steps: int, parts: int) -> Callable[[int], Any]:
    rows = tf.nest.flatten(batch)[0].shape[0]
    if rows % (parts * micro_steps):
        raise InputError(
            "Every micro-step needs equally many rows of each shard of a batch. Received: a batch of "
            f"{rows} rows, {parts} shards and {micro_steps} micro-steps. Use a multiple of {parts * micro_steps} rows, or "
            "leave out accumulate_steps."
        )

    def split(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, [parts, micro_steps, x.shape[0] // (parts * micro_steps), *x.shape[1:]])

    def joined(x: tf.Tensor, number: int) -> tf.Tensor:
        return tf.reshape(x[:, number], [x.shape[0] * x.shape[2], *x.shape[3:]])

    shares = tf.nest.map_structure(split, batch)
    return lambda number: tf.nest.map_structure(lambda x: joined(x, number), shares)
