"""Accumulation: the rows of a replica in several micro-steps, whose gradients are added before anything is sent."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Of one micro-step's rows: the gradients, and scalars to be added likewise.
Differentiate = Callable[[Any], tuple[list[tf.Tensor], tf.Tensor]]


def accumulated(
    differentiate: Differentiate,
    batch: Any,
    micro_steps: int,
    shapes: Sequence[tf.TensorSpec],
    dtype: tf.DType,
    parts: int = 0,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Adds gradients and losses over micro-steps, one after the other, so that one's activations are held at a time.

    Rows are dealt to micro-steps as evenly as possible. The compiled graph has one micro-step in a loop, whatever their
    number.

    Args:
      differentiate: returns dense gradients and the loss of some rows; must not communicate.
      batch: structure of tensors with the replica's rows first.
      micro_steps: at least 2; where there are fewer rows, so many are made.
      shapes: shapes and dtypes of the gradients.
      dtype: of the loss.
      parts: if rows lie in so many parts on as many devices, each micro-step takes an equal share of each part. Then the
        graph has each micro-step by itself: DTensor mixes the bodies of loops up, now and then, and refuses.
    """
    if parts:
        return _unrolled(differentiate, _shares_of_parts(batch, micro_steps, parts), micro_steps)
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    used = tf.minimum(micro_steps, rows)  # the last batch of a pass may have fewer rows than there are micro-steps
    part = _successive_rows(batch, micro_steps, rows, used)

    def body(number: tf.Tensor, gradients: list[tf.Tensor], loss: tf.Tensor) -> tuple[Any, ...]:
        more, value = differentiate(part(number))
        return number + 1, [a + b for a, b in zip(gradients, more, strict=True)], loss + value

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
        more, value = differentiate(part(number))
        gradients, loss = [a + b for a, b in zip(gradients, more, strict=True)], loss + value
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
    def split(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, [parts, micro_steps, x.shape[0] // (parts * micro_steps), *x.shape[1:]])

    def joined(x: tf.Tensor, number: int) -> tf.Tensor:
        return tf.reshape(x[:, number], [x.shape[0] * x.shape[2], *x.shape[3:]])

    shares = tf.nest.map_structure(split, batch)
    return lambda number: tf.nest.map_structure(lambda x: joined(x, number), shares)
