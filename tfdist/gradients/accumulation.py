"""Accumulates gradients over micro-batches, and clips gradients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import InputError, is_number

# (rows of a micro-step) -> (gradients, loss)
Differentiate = Callable[[Any], tuple[list[tf.Tensor], tf.Tensor]]


def accumulate_gradients(
    differentiate: Differentiate,
    batch: Any,
    micro_steps: int,
    shapes: Sequence[tf.TensorSpec],
    dtype: tf.DType,
    shards: int = 0,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sums gradients and losses over consecutive micro-steps. Only one micro-step's activations are in memory at a time.

    Rows are divided among micro-steps as evenly as possible. The compiled graph is a loop over one micro-step.

    Args:
      differentiate: returns the dense gradients and the loss of some rows; must not communicate.
      batch: structure of tensors whose first dim is this replica's rows, at least 1.
      micro_steps: number of micro-steps, at least 2. If there are fewer rows, each micro-step has one row.
      shapes: shapes and dtypes of the gradients.
      dtype: dtype of the loss.
      shards: number of devices over which rows are sharded, or 0. If sharded, each micro-step takes an equal part of
        each shard, and micro-steps are unrolled, because DTensor intermittently mixes up the bodies of loops and
        rejects them.

    Returns:
      The sums of the gradients and of the losses.
    """
    if shards:
        slice_shards = _shard_slicer(batch, micro_steps, shards)
        return functools.reduce(_add, (differentiate(slice_shards(index)) for index in range(micro_steps)))
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    # The last batch of a pass may have fewer rows than there are micro-steps.
    step_count = tf.minimum(micro_steps, rows)
    static_rows = tf.nest.flatten(batch)[0].shape[0]
    static_size = static_rows // micro_steps if static_rows is not None and static_rows % micro_steps == 0 else None

    def slice_rows(index: tf.Tensor) -> Any:
        start, end = index * rows // step_count, (index + 1) * rows // step_count
        return tf.nest.map_structure(lambda x: tf.ensure_shape(x[start:end], [static_size, *x.shape[1:]]), batch)

    def body(index: tf.Tensor, gradients: list[tf.Tensor], loss: tf.Tensor) -> tuple[Any, ...]:
        return index + 1, *_add((gradients, loss), differentiate(slice_rows(index)))

    zeros = [tf.zeros(spec.shape, spec.dtype) for spec in shapes]
    _, gradients, loss = tf.while_loop(
        lambda index, *_: index < step_count,
        body,
        (tf.constant(0), zeros, tf.zeros([], dtype)),
        parallel_iterations=1,
        maximum_iterations=micro_steps,
    )
    return gradients, loss


def _add(
    first: tuple[Sequence[tf.Tensor], tf.Tensor], second: tuple[Sequence[tf.Tensor], tf.Tensor]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    return [a + b for a, b in zip(first[0], second[0], strict=True)], first[1] + second[1]


def _shard_slicer(batch: Any, micro_steps: int, shards: int) -> Callable[[int], Any]:
    rows = tf.nest.flatten(batch)[0].shape[0]
    if rows % (shards * micro_steps):
        raise InputError(
            "Every micro-step needs the same number of rows from each shard of a batch. Received: a batch of "
            f"{rows} rows, {shards} shards and {micro_steps} micro-steps. Use a multiple of {shards * micro_steps} rows, or "
            "remove accumulate_steps."
        )

    def split(x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, [shards, micro_steps, x.shape[0] // (shards * micro_steps), *x.shape[1:]])

    parts = tf.nest.map_structure(split, batch)
    return lambda index: tf.nest.map_structure(
        lambda x: tf.reshape(x[:, index], [rows // micro_steps, *x.shape[3:]]), parts
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """The limits of gradient clipping.

    Attributes:
      norm: maximum global norm: all gradients are scaled by min(1, norm / global norm) (Pascanu et al., 2013,
        arXiv:1211.5063); 0 for no limit.
      value: maximum absolute value of an element; 0 for no limit.
    """

    norm: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        for name in ("norm", "value"):
            value = getattr(self, name)
            if not is_number(value) or not value >= 0:
                raise InputError(f"Clip: {name} must be a number of at least 0. Received: {value!r}.")

    def __call__(self, gradients: Sequence[tf.Tensor], norm: tf.Tensor) -> list[tf.Tensor]:
        """Returns clipped gradients.

        Args:
          gradients: reduced gradients.
          norm: global norm of the gradients, a scalar.
        """
        results = list(gradients)
        if self.norm:
            factor = self.norm / tf.maximum(norm, tf.cast(self.norm, norm.dtype))
            results = [gradient * tf.cast(factor, gradient.dtype) for gradient in results]
        if self.value:
            results = [tf.clip_by_value(gradient, -self.value, self.value) for gradient in results]
        return results
