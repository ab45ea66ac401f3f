"""Early stopping and reductions of the learning rate that count evaluations, at whichever steps these are."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.config.decay import Plateau
from tfdist.config.monitor import MODES, parse_best
from tfdist.errors import InputError
from tfdist.errors.formatting import count_of, is_integer, nearest
from tfdist.trainer.program import Program


class CountsEvaluations(keras.callbacks.Callback):
    """Mixin of a Keras callback that checks a monitored metric at the end of each epoch.

    With it, the callback checks a `val_` metric after each evaluation, and any other at the end of each epoch. It comes
    before Keras's class among the bases, whose `on_epoch_end` is then called by `_check` alone.
    """

    monitor: str  # of Keras's class
    mode: str
    _step = 0

    @property
    def _monitors_evaluations(self) -> bool:
        return self.monitor.startswith("val_")

    @property
    def _unit(self) -> str:
        return "evaluation" if self._monitors_evaluations else "epoch"

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """See base class.

        Raises:
          InputError: the direction of the metric is unknown.
        """
        super().on_train_begin(logs)
        self._step = 0
        direction_of(self)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """See base class."""
        self._step = batch + 1

    def on_evaluation(self, step: int, logs: Mapping[str, float]) -> None:
        """Called by `Trainer.fit` after each evaluation.

        Args:
          step: number of updates done.
          logs: the results, under their `val_` names.
        """
        self._step = step
        if self._monitors_evaluations:
            self._check(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """See base class."""
        # Keras's own `fit` has the results of an evaluation here, and reports no evaluation otherwise.
        if not (self._monitors_evaluations and (self.params or {}).get("reports_evaluations")):
            self._check(logs or {})

    def _check(self, logs: Mapping[str, float]) -> None:
        """Calls `on_epoch_end` of Keras's class with the results, of which one is monitored."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that Keras's class does not have, for a checkpoint."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self._step = state["step"]


def direction_of(callback: keras.callbacks.Callback) -> str:
    """Returns the direction in which the metric of a callback improves, "min" or "max"; the callback has its model.

    Raises:
      InputError: Keras does not know the direction.
    """
    direction = keras_internals.monitored_direction(callback)
    if not direction:
        raise InputError(
            "Cannot infer whether higher or lower values of a metric are better. Received: "
            f"{callback.monitor}. Add mode=max or mode=min, as in "
            f"{callback.monitor}(mode=max)."
        )
    return direction


class EarlyStopping(CountsEvaluations, keras.callbacks.EarlyStopping):
    """`keras.callbacks.EarlyStopping` whose patience is in evaluations, at whichever steps these are.

    Keras's own checks its metric at the end of each epoch, where there is no `val_` metric if `Schedule.eval_every`
    schedules evaluations at other steps. This one checks a `val_` metric after each evaluation, and any other metric at
    the end of each epoch. All ranks stop at the same step. The callback's state is saved with the run: a run
    that it has stopped stays stopped when it is resumed.
    """

    def __init__(self, monitor: str = "val_loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "auto"):
        """Initializes the callback.

        Args:
          monitor: name of the metric, with the prefix `val_` for one of an evaluation.
          patience: number of evaluations without an improvement after which training stops, at least 0.
          min_delta: smallest change that counts as an improvement, in units of the metric.
          mode: "min" if lower values are better, "max" if higher ones are; "auto" to infer it from the metric.

        Raises:
          InputError: `patience` is not an integer of at least 0, or `mode` is unknown.
        """
        if not is_integer(patience) or patience < 0:
            raise InputError(f"`patience` must be an integer of at least 0. Received: {patience!r}.")
        if mode not in MODES:
            raise InputError(f"`mode` must be {', '.join(MODES[:-1])} or {MODES[-1]}. Received: {mode!r}.")
        super().__init__(monitor, min_delta=min_delta, patience=patience, mode=mode)
        self._checks = 0
        self.best_step = self.stopped_step = 0

    @property
    def reason(self) -> str:
        """Why the run was stopped, such as `early stopping at step 90: val_loss has not ...`; empty if it was not."""
        if not self.stopped_step:
            return ""
        return (
            f"early stopping at step {self.stopped_step}: {self.monitor} has not improved for "
            f"{count_of(self.wait, self._unit)} since step {self.best_step}"
        )

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """See base class."""
        super().on_train_begin(logs)
        self._checks = 0
        self.best_step = self.stopped_step = 0

    def _check(self, logs: Mapping[str, float]) -> None:
        """See base class."""
        stopped_before = self.stopped_epoch
        keras.callbacks.EarlyStopping.on_epoch_end(self, self._checks, dict(logs))  # checks take the place of epochs
        self._checks += 1
        if self.wait == 0:
            self.best_step = self._step
        if self.stopped_epoch != stopped_before:
            self.stopped_step = self._step

    def state_dict(self) -> dict[str, Any]:
        """See base class."""
        own = {"best_step": self.best_step, "stopped_step": self.stopped_step, "looks": self._checks}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See base class."""
        super().load_state_dict(state)
        self.best_step, self.stopped_step = state["best_step"], state["stopped_step"]
        self._checks = state["looks"]


_log = logging.getLogger(__name__)


class ReduceLROnPlateau(CountsEvaluations, keras.callbacks.ReduceLROnPlateau):
    """`keras.callbacks.ReduceLROnPlateau` whose patience and cooldown are in evaluations, at whichever steps these are.

    Keras's own checks its metric at the end of each epoch, where there is no `val_` metric if `Schedule.eval_every`
    schedules evaluations at other steps. This one checks a `val_` metric after each evaluation, and any other metric at
    the end of each epoch. All ranks see the same results, so the rate falls at the same step on each. The callback's
    state and the learning rate are saved with the run.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        mode: str = "auto",
    ):
        """Initializes the callback.

        Args:
          monitor: name of the metric; `val_` and its name for one of an evaluation.
          factor: factor of the learning rate, in [0, 1).
          patience: number of evaluations without an improvement after which the rate falls.
          min_delta: smallest change that counts as an improvement.
          cooldown: number of evaluations after a fall that do not count.
          min_lr: smallest learning rate.
          mode: "min" if lower values are better, "max" if higher ones are; "auto" to infer it from the metric.

        Raises:
          InputError: one of them is out of range.
        """
        Plateau(  # validates them
            monitor=monitor,
            mode=mode,
            factor=factor,
            patience=patience,
            min_delta=min_delta,
            cooldown=cooldown,
            min_lr=min_lr,
        )
        super().__init__(
            monitor, factor=factor, patience=patience, min_delta=min_delta, cooldown=cooldown, min_lr=min_lr, mode=mode
        )

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """See base class.

        Raises:
          InputError: the optimizer has a schedule, whose rate cannot be set, or the direction of the metric is unknown.
        """
        super().on_train_begin(logs)
        schedule = keras_internals.scheduled_learning_rate(self.model.optimizer)
        if schedule is not None:
            raise InputError(
                "ReduceLROnPlateau needs an optimizer whose learning rate is a number. Received: a "
                f"{type(schedule).__name__}. Leave one of them out."
            )

    def _check(self, logs: Mapping[str, float]) -> None:
        """See base class; logs a fall."""
        with_rate: dict[str, Any] = dict(logs)
        keras.callbacks.ReduceLROnPlateau.on_epoch_end(self, self._step, with_rate)  # adds the rate before
        before = with_rate.get("learning_rate", 0.0)  # none of several optimizers
        after = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)) if before else 0.0
        if after < before and (self.params or {}).get("is_chief", True):
            _log.info(
                "The learning rate falls from %.3g to %.3g at step %d: %s has not improved for %s.",
                before,
                after,
                self._step,
                self.monitor,
                count_of(max(self.patience, 1), self._unit),
            )


def check_monitored(
    callbacks: Sequence[keras.callbacks.Callback], best: str, program: Program, evaluates: bool
) -> tuple[str, str]:
    """Checks the metrics that a run monitors: of this library's callbacks (Keras's own warn themselves), and the best one.

    Args:
      callbacks: callbacks of the run.
      best: see `Checkpoints.best`; "" for none.
      program: what is trained.
      evaluates: whether the run evaluates.

    Returns:
      The metric whose best value is kept, and its direction, "min" or "max"; empty without one.

    Raises:
      InputError: the run does not measure a metric, or its direction is unknown.
    """
    for callback in callbacks:
        if isinstance(callback, CountsEvaluations):
            _direction(callback.monitor, callback.mode, program, evaluates)
    if not best:
        return "", ""
    monitor = parse_best(best)
    return monitor.metric, _direction(monitor.metric, monitor.mode, program, evaluates)


def _direction(metric: str, mode: str, program: Program, evaluates: bool) -> str:
    """Returns the direction of a metric that the run measures."""
    measured = ["loss", *program.metrics.results([np.zeros(v.shape) for v in program.metrics.variables])]
    if metric.startswith("val_") and not evaluates:
        raise InputError(
            "A metric of an evaluation needs data to evaluate. Received: "
            f"{metric}, without any. Give validation data, or watch {metric.removeprefix('val_')}."
        )
    known = [f"val_{name}" for name in measured if evaluates] + measured
    if metric not in known:
        raise InputError(
            f"A metric to watch must be one that the run measures. Received: {metric}.{nearest(metric, known)}"
        )
    callback = keras.callbacks.EarlyStopping(metric, mode=mode)
    callback.set_model(program.model)
    return direction_of(callback)
