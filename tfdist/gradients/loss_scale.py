"""Loss scaling: multiplies the loss by a power of two to prevent small float16 gradients from underflowing.

The loss is multiplied before the backward pass, and the gradients are divided after it, in float32. If a gradient
overflows on any replica, all replicas skip the step and the scale is halved; after a number of consecutive good steps, it
is doubled.

Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.config.spec import call, parse
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError


class ScaleState(NamedTuple):
    """State of a loss scale: scalars, the same on all replicas."""

    scale: Any  # float32; factor of the loss
    good_steps: Any  # int32; steps since the scale changed or a step was skipped
    patience: Any  # int32; remaining overflows until the scale is halved
    skipped_in_a_row: Any  # int32; steps skipped since the last good one


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Initial value and schedule of the loss scale. Immutable: the caller stores the state.

    Attributes:
      initial: initial scale.
      growth_interval: consecutive good steps after which the scale is doubled; 0 for a constant scale.
      hysteresis: overflows until the scale is halved; the count restarts when the scale is doubled.
      floor: the scale is never halved below this; may be below 1.
      cap: the scale is never doubled above this.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    hysteresis: int = 1
    floor: float = 2.0**-14
    cap: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.initial <= self.cap < float("inf"):
            raise InputError(
                "A loss scale needs 0 < floor <= initial <= cap. Received: "
                f"floor={self.floor:g}, initial={self.initial:g}, cap={self.cap:g}."
            )
        if self.growth_interval < 0 or self.hysteresis < 1:
            raise InputError(
                "A loss scale needs growth_interval >= 0 and hysteresis >= 1. Received: "
                f"growth_interval={self.growth_interval}, hysteresis={self.hysteresis}."
            )

    def state(self) -> list[State]:
        """Returns the state to store, in the order of `ScaleState`."""
        initial_state = ScaleState(self.initial, 0, self.hysteresis, 0)
        dtypes = ScaleState(tf.float32, tf.int32, tf.int32, tf.int32)
        return [
            State(f"loss_scale/{name}", (), dtype, per_replica=False, initial=initial)
            for name, dtype, initial in zip(ScaleState._fields, dtypes, initial_state, strict=True)
        ]

    def next_state(self, state: Sequence[tf.Tensor], finite: tf.Tensor | bool) -> ScaleState:
        """Returns the state after a step.

        Args:
          state: state before the step.
          finite: scalar bool; whether every gradient of every replica is finite.
        """
        previous, finite = ScaleState(*state), tf.convert_to_tensor(finite)
        if not self.growth_interval:
            return previous._replace(skipped_in_a_row=tf.where(finite, 0, previous.skipped_in_a_row + 1))
        grows = tf.logical_and(finite, previous.good_steps + 1 >= self.growth_interval)
        shrinks = tf.logical_and(tf.logical_not(finite), previous.patience <= 1)
        scale = tf.where(grows, tf.minimum(previous.scale * 2, self.cap), previous.scale)
        patience = tf.where(finite, previous.patience, tf.maximum(previous.patience - 1, 1))
        return ScaleState(
            scale=tf.where(shrinks, tf.maximum(scale / 2, self.floor), scale),
            good_steps=tf.where(tf.logical_and(finite, tf.logical_not(grows)), previous.good_steps + 1, 0),
            patience=tf.where(grows, self.hysteresis, patience),
            skipped_in_a_row=tf.where(finite, 0, previous.skipped_in_a_row + 1),
        )


def parse_loss_scale(text: str) -> LossScale | None:
    """Parses `--loss_scale`: `dynamic`, `dynamic(initial_power=15, growth_interval=2000, ...)` or a number.

    Args:
      text: value of the flag; empty for no loss scaling.

    Raises:
      InputError: the text is invalid, or a parameter is unknown or out of range.
    """
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        spec = parse(text)
        if spec.name != "dynamic":
            raise InputError(f"--loss_scale must be dynamic(...) or a number. Received: {text}.") from None
        return call(_create_dynamic, spec)
    return LossScale(initial=number, growth_interval=0, floor=number, cap=number)


def _create_dynamic(
    *,
    initial_power: float = 15,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    floor: float = LossScale.floor,
    cap: float = LossScale.cap,
) -> LossScale:
    if growth_interval < 1:
        raise InputError(f"A dynamic loss scale needs growth_interval >= 1. Received: {growth_interval}.")
    return LossScale(
        initial=2.0**initial_power, growth_interval=growth_interval, hysteresis=hysteresis, floor=floor, cap=cap
    )


class LossScaler:
    """A loss scale with its state, for custom training loops.

    ```python
    scaler = tfdist.LossScaler(strategy)

    def compute(batch):  # a replica function
        loss, gradients = ...  # of scaler.scale(loss)
        gradients = scaler.unscale(gradients)
        return gradients, scaler.all_finite(gradients)

    gradients, finite = strategy.run(compute, batch)
    finite = strategy.local(finite)[0]
    tf.cond(finite, lambda: strategy.run(apply, gradients), lambda: ...)
    scaler.update(finite)
    ```
    """

    def __init__(self, strategy: Strategy, loss_scale: LossScale | None = None):
        """Creates the state.

        Args:
          strategy: strategy whose replicas share the scale.
          loss_scale: initial value and schedule; dynamic by default.
        """
        self._rule = loss_scale or LossScale()
        self._strategy = strategy
        self.variables = strategy.allocate(self._rule.state())

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss multiplied by the scale. Call it in a replica function."""
        return loss * tf.cast(self.variables[0], loss.dtype)

    def unscale(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the gradients divided by the scale. Call it in a replica function."""
        return [unscale(gradient, tf.convert_to_tensor(self.variables[0])) for gradient in gradients]

    def all_finite(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a scalar bool: whether every gradient of every replica is finite.

        Call it in a replica function. Cost: one small all-reduce.
        """
        sums = [tf.reduce_sum(tf.cast(tf.convert_to_tensor(gradient), tf.float32)) for gradient in gradients]
        [total] = self._strategy.collectives.all_reduce([tf.reshape(tf.add_n(sums) * 0, [1])], name="loss_scale/finite")
        return tf.math.is_finite(total[0])

    def update(self, finite: tf.Tensor) -> None:
        """Updates the scale after a step. Call it outside of replica functions.

        Args:
          finite: result of `all_finite`, which is equal on all replicas.
        """
        new_state = self._rule.next_state([tf.convert_to_tensor(v) for v in self.variables], finite)

        def assign(*values: tf.Tensor) -> None:
            for variable, value in zip(self.variables, values, strict=True):
                variable.assign(value)

        self._strategy.run(assign, *new_state)


def unscale(gradient: tf.Tensor | tf.IndexedSlices, scale: int | tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Divides a gradient by the scale of its loss."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(unscale(gradient.values, scale), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(scale, gradient.dtype)
