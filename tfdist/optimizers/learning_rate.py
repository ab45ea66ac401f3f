"""The learning rate as a pure function of batch size and step: scaling, warmup and decay."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from tfdist import keras_internals
from tfdist.config import decay as decays
from tfdist.config.spec import Spec, call_user_function, load_object
from tfdist.errors import InputError, nearest

_MAX_CYCLE_START = 2**40  # step; no run reaches later cycles


class RunProgress(NamedTuple):
    """The position of a step in a run."""

    step: tf.Tensor  # scalar int64, step of the run
    steps_after_warmup: tf.Tensor  # scalar int64, steps since the end of the warmup; negative within it
    progress: tf.Tensor  # scalar in [0, 1], from the end of the warmup to the end of the run


def decay_factor(decay: decays.Decay, position: RunProgress) -> tf.Tensor | float:
    """Returns the learning rate at a step as a fraction of the peak; `decay` is one of `tfdist.config.decay`."""
    progress, dtype = position.progress, position.progress.dtype
    match decay:
        case decays.NoDecay() | decays.Plateau() | decays.CustomDecay():
            return 1.0  # `Plateau` changes the rate after evaluations, not by step
        case decays.Cosine():
            return decay.to + (1 - decay.to) * 0.5 * (1 + ops.cos(math.pi * progress))
        case decays.Linear():
            return 1 - (1 - decay.to) * progress
        case decays.Polynomial():
            return decay.to + (1 - decay.to) * (1 - progress) ** decay.power
        case decays.Exponential():
            steps_done = ops.cast(ops.maximum(position.steps_after_warmup, 0), dtype)
            return decay.factor ** (steps_done / decay.every if decay.every else progress)
        case decays.Step():
            return decay.factor ** ops.cast(ops.floor_divide(position.step, decay.every), dtype)
        case decays.CosineRestarts():
            cycle, fraction = _cycle(decay, ops.maximum(position.steps_after_warmup, 0), dtype)
            return decay.to + (1 - decay.to) * decay.m_mul**cycle * 0.5 * (1 + ops.cos(math.pi * fraction))
        case decays.OneCycle():
            first = 1 / decay.div_factor
            last = first / decay.final_div_factor
            rise, fall = _rise_and_fall(decay, progress)
            return ops.where(progress < decay.pct_start, first + (1 - first) * rise, 1 + (last - 1) * fall)
    raise TypeError(f"Unknown decay: {decay!r}.")


def _cycle(decay: decays.CosineRestarts, steps_done: tf.Tensor, dtype: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the index of the cycle of a step, and the elapsed fraction of the cycle.

    Cycles are found by comparing integers: the logarithm in Keras's `CosineDecayRestarts` is inexact at their boundaries.
    """
    if decay.t_mul == 1:
        cycle = ops.cast(ops.floor_divide(steps_done, decay.first), dtype)
        return cycle, ops.cast(ops.mod(steps_done, decay.first), dtype) / decay.first
    cycle_start, length = 0.0, float(decay.first)
    cycle, start, steps = (ops.cast(number, dtype) for number in (0, 0, decay.first))
    while (cycle_start := cycle_start + length) < _MAX_CYCLE_START:
        length *= decay.t_mul
        has_started = steps_done >= math.ceil(cycle_start)  # scalars, because a mesh accepts no other constants
        cycle += ops.cast(has_started, dtype)
        start, steps = ops.where(has_started, cycle_start, start), ops.where(has_started, length, steps)
    return cycle, (ops.cast(steps_done, dtype) - start) / steps


def _rise_and_fall(decay: decays.OneCycle, progress: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the progress of the rise and of the fall, both in [0, 1]."""
    rise = ops.clip(progress / decay.pct_start, 0, 1)
    fall = ops.clip((progress - decay.pct_start) / (1 - decay.pct_start), 0, 1)
    if decay.anneal == "linear":
        return rise, fall
    return 0.5 * (1 - ops.cos(math.pi * rise)), 0.5 * (1 - ops.cos(math.pi * fall))


SCALINGS: Mapping[str, Callable[[float], float]] = {"none": lambda times: 1.0, "linear": float, "sqrt": math.sqrt}


def make_learning_rate(
    base: float,
    *,
    scaling: str = "none",
    base_batch_size: int = 0,
    batch_size: int = 0,
    warmup_steps: int = 0,
    warmup_start: float = 0.0,
    decay: str = "none",
    total_steps: int = 0,
) -> "float | WarmupAndDecay":
    """Returns the learning rate of a run: a float if it is constant, else a schedule.

    Args:
      base: the rate for a batch of `base_batch_size`.
      scaling: factor of the rate for a batch k times as large: "linear": k (Goyal et al., arXiv:1706.02677); "sqrt":
        the square root of k, which preserves the variance of an update (Krizhevsky, arXiv:1404.5997); "none": 1.
      base_batch_size: at least 1 if the rate is scaled.
      batch_size: global batch size of the run; at least 1 if the rate is scaled.
      warmup_steps: see `WarmupAndDecay`.
      warmup_start: see `WarmupAndDecay`.
      decay: see `WarmupAndDecay`.
      total_steps: see `WarmupAndDecay`.

    Raises:
      InputError: an argument is out of range.
    """
    if scaling not in SCALINGS:
        raise InputError(f"--lr_scaling={scaling} is not known.{nearest(scaling, SCALINGS)}")
    if scaling != "none" and min(base_batch_size, batch_size) < 1:
        raise InputError(
            "--lr_scaling needs --base_batch_size, the batch size for which --learning_rate was tuned. Received: "
            f"--lr_scaling={scaling} --base_batch_size={base_batch_size} --batch_size={batch_size}."
        )
    peak = base * SCALINGS[scaling](batch_size / base_batch_size) if scaling != "none" else base
    schedule = WarmupAndDecay(
        peak, warmup_steps=warmup_steps, warmup_start=warmup_start, decay=decay, total_steps=total_steps
    )
    return peak if schedule.is_constant else schedule


@keras.saving.register_keras_serializable(package="tfdist")
class WarmupAndDecay(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises linearly to its peak and decays from there.

    Step k, counted from 0, has the rate peak * rise(k) * fall(k), where rise(k) = start + (1 - start) k / W for k < W =
    `warmup_steps`, else 1. The rate depends only on k, so a resumed run has the same rates. It is computed in Keras's floatx.
    docs/guides/gradients.md has the equations of the decays.

    With `one_cycle`, `Trainer` and Keras's `fit` on replicas also set the momentum of the optimizer to `momentum(k)`.
    `plateau` leaves the rate constant, to be changed by `tfdist.ReduceLROnPlateau`.

    Args:
      peak: the rate at the end of the warmup; at least 0.
      warmup_steps: number of steps of the warmup; 0 for none.
      warmup_start: the rate of step 0 as a fraction of the peak, in [0, 1]; Goyal et al. use 1 / k for a batch k times
        as large.
      decay: value of `--decay`: none, cosine, cosine_restarts, exponential, linear, one_cycle, plateau, polynomial, step,
        or a user-defined `package.module:function`. Decays begin at the end of the warmup, and are constant after the end
        of the run; `step` decays at regular intervals of the run, including the warmup.
      total_steps: number of steps of the run, for decays that last until its end.

    Raises:
      InputError: an argument is out of range.
    """

    def __init__(
        self,
        peak: float,
        *,
        warmup_steps: int = 0,
        warmup_start: float = 0.0,
        decay: str = "none",
        total_steps: int = 0,
    ):
        if isinstance(peak, str) or not (peak >= 0 and math.isfinite(peak)):
            raise InputError(f"--learning_rate must be at least 0 and finite. Received: {peak}.")
        if warmup_steps < 0 or int(warmup_steps) != warmup_steps:
            raise InputError(f"--warmup_steps must be an integer of at least 0. Received: {warmup_steps}.")
        if not 0 <= warmup_start <= 1:
            raise InputError(f"--warmup_start must be a fraction of the peak, in [0, 1]. Received: {warmup_start}.")
        self.peak = float(peak)
        self.warmup_steps = warmup_steps
        self.warmup_start = float(warmup_start)
        self.decay = decay
        self.total_steps = total_steps
        self._decay = decays.parse_decay(decay)
        if warmup_steps and self._decay.warmup_conflict:
            raise InputError(
                f"--decay={decay} cannot follow a warmup: {self._decay.warmup_conflict}. Received: "
                f"--warmup_steps={warmup_steps}. Remove --decay or --warmup_steps."
            )
        if self._decay.needs_total_steps and warmup_steps >= total_steps:
            raise InputError(
                f"--decay={decay} falls from the end of the warmup to the end of the run. Received: "
                f"--warmup_steps={warmup_steps} in a run of {total_steps} steps. Lower --warmup_steps or train longer."
            )
        self._user_schedule = (
            self._load_user_schedule(self._decay.spec) if isinstance(self._decay, decays.CustomDecay) else None
        )

    @property
    def is_constant(self) -> bool:
        """Whether every step has the same rate."""
        does_not_fall = isinstance(self._decay, decays.NoDecay | decays.Plateau)
        return does_not_fall and (not self.warmup_steps or self.warmup_start == 1)

    @property
    def cycles_momentum(self) -> bool:
        """Whether the momentum of the optimizer also changes."""
        return isinstance(self._decay, decays.OneCycle) and self._decay.cycle_momentum

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of a step.

        Args:
          step: number of previous updates; an int or a scalar tensor.

        Returns:
          A scalar of Keras's floatx.
        """
        position = self._position(step)
        float_step = ops.cast(position.step, position.progress.dtype)
        rate = self.peak * ops.ones_like(float_step)
        if self._user_schedule is not None:
            rate = ops.cast(keras_internals.with_autograph(self._user_schedule)(position.step), float_step.dtype)
        if self.warmup_steps:  # this form is exactly 1 at the end
            rate *= 1 - (1 - self.warmup_start) * ops.maximum(1 - float_step / self.warmup_steps, 0)
        return rate * decay_factor(self._decay, position)

    def momentum(self, step: Any) -> tf.Tensor:
        """Returns the momentum of a step, like `__call__`; defined only if `cycles_momentum`."""
        assert isinstance(self._decay, decays.OneCycle)
        low, high, progress = self._decay.base_momentum, self._decay.max_momentum, self._position(step).progress
        rise, fall = _rise_and_fall(self._decay, progress)
        return ops.where(progress < self._decay.pct_start, high + (low - high) * rise, low + (high - low) * fall)

    def _position(self, step: Any) -> RunProgress:
        step = ops.cast(step, "int64")
        span = max(self.total_steps - self.warmup_steps, 1)
        float_step = ops.cast(step, keras.config.floatx())
        progress = ops.clip((float_step - self.warmup_steps) / span, 0, 1)
        return RunProgress(step, step - self.warmup_steps, progress)

    def _load_user_schedule(self, spec: Spec) -> Callable[[Any], Any]:
        """Loads a user-defined schedule, and checks its rate for step 0."""
        defaults = {"learning_rate": self.peak, "warmup_steps": self.warmup_steps, "total_steps": self.total_steps}
        schedule: Callable[[Any], Any] = call_user_function("--decay", load_object(spec.name), spec, **defaults)
        first_rate = (
            call_user_function("--decay", lambda: schedule(0), Spec(spec.name)) if callable(schedule) else schedule
        )
        try:
            is_rate = callable(schedule) and ops.shape(first_rate) == () and math.isfinite(float(first_rate))
        except (TypeError, ValueError):
            is_rate = False
        if not is_rate:
            received = f"{first_rate!r:.60} for step 0" if callable(schedule) else type(schedule).__name__
            raise InputError(
                f"--decay={spec} must return a keras.optimizers.schedules.LearningRateSchedule, or a function of the step "
                f"that returns a rate. Received: {received}. Return one of these."
            )
        return schedule

    def get_config(self) -> dict[str, Any]:
        names = ("peak", "warmup_steps", "warmup_start", "decay", "total_steps")
        return {name: getattr(self, name) for name in names}
