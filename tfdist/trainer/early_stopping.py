"""Early stopping and learning-rate reduction with patience counted in evaluations, which may take place at any step."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.config.decay import Plateau
from tfdist.config.monitor import MODES, parse_monitor
from tfdist.errors import InputError, count_of, is_integer, nearest
from tfdist.trainer.program import Program


class EvaluationMonitor(keras.callbacks.Callback):
    """Mixin for a Keras callback that monitors a metric.

    The callback checks a `val_` metric after each evaluation, and any other metric at the end of each epoch. The mixin
    precedes Keras's class in the bases; `_check` calls the `on_epoch_end` of that class.
    """

    monitor: str  # an attribute of Keras's class
    mode: str
    _step = 0
    _saved_attributes: Mapping[str, str] = {"step": "_step"}  # names of attributes by their names in a checkpoint

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
        self._step = batch + 1

    def on_evaluation(self, step: int, logs: Mapping[str, float]) -> None:
        """Called by `Trainer.fit` after each evaluation.

        Args:
          step: number of completed updates.
          logs: the results, whose names have the prefix `val_`.
        """
        self._step = step
        if self._monitors_evaluations:
            self._check(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        # Keras's own `fit` has the results of an evaluation here, and does not call `on_evaluation`.
        if not (self._monitors_evaluations and (self.params or {}).get("reports_evaluations")):
            self._check(logs or {})

    def _check(self, logs: Mapping[str, float]) -> None:
        """Calls `on_epoch_end` of Keras's class with results that include the monitored one."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in addition to that of Keras's class, for a checkpoint."""
        return {key: getattr(self, name) for key, name in self._saved_attributes.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        for key, name in self._saved_attributes.items():
            setattr(self, name, state[key])


def direction_of(callback: keras.callbacks.Callback) -> str:
    """Returns the direction in which the metric of a callback improves, "min" or "max"; the callback must have its model.

    Raises `InputError` if Keras does not know it.
    """
    direction = keras_internals.monitored_direction(callback)
    if not direction:
        raise InputError(
            f"Cannot infer whether higher or lower values of a metric are better. Received: {callback.monitor}. Add "
            f"mode=max or mode=min, as in {callback.monitor}(mode=max)."
        )
    return direction


class EarlyStopping(EvaluationMonitor, keras.callbacks.EarlyStopping):
    """`keras.callbacks.EarlyStopping` with patience counted in evaluations, which may take place at any step.

    Keras's class checks its metric at the end of each epoch, where `val_` metrics are missing if `Schedule.eval_every`
    schedules evaluations at other steps. This class checks a `val_` metric after each evaluation, and any other metric at
    the end of each epoch. All ranks stop at the same step. The callback's state is saved with the run, so a stopped run
    remains stopped when it is resumed.
    """

    _saved_attributes = {"step": "_step", "best_step": "best_step", "stopped_step": "stopped_step", "looks": "_checks"}

    def __init__(self, monitor: str = "val_loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "auto"):
        """Initializes the callback.

        Args:
          monitor: name of the metric, with the prefix `val_` for a metric of an evaluation.
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
        """The reason for a stop, such as `early stopping at step 90: val_loss has not ...`; "" without a stop."""
        if not self.stopped_step:
            return ""
        return (
            f"early stopping at step {self.stopped_step}: {self.monitor} has not improved for "
            f"{count_of(self.wait, self._unit)} since step {self.best_step}"
        )

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        super().on_train_begin(logs)
        self._checks = 0
        self.best_step = self.stopped_step = 0

    def _check(self, logs: Mapping[str, float]) -> None:
        previous_stopped_epoch = self.stopped_epoch
        keras.callbacks.EarlyStopping.on_epoch_end(self, self._checks, dict(logs))  # checks replace epochs
        self._checks += 1
        if self.wait == 0:
            self.best_step = self._step
        if self.stopped_epoch != previous_stopped_epoch:
            self.stopped_step = self._step


_log = logging.getLogger(__name__)


class ReduceLROnPlateau(EvaluationMonitor, keras.callbacks.ReduceLROnPlateau):
    """`keras.callbacks.ReduceLROnPlateau` with patience and cooldown counted in evaluations, at any step.

    It checks its metric at the same steps as `EarlyStopping`. All ranks see the same results, so they reduce the rate at the
    same step. The callback's state and the learning rate are saved with the run.
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
          monitor: name of the metric, with the prefix `val_` for a metric of an evaluation.
          factor: factor by which the learning rate is multiplied, in [0, 1).
          patience: number of evaluations without an improvement after which the rate is reduced.
          min_delta: smallest change that counts as an improvement.
          cooldown: number of evaluations after a reduction during which patience is not counted.
          min_lr: smallest learning rate.
          mode: "min" if lower values are better, "max" if higher ones are; "auto" to infer it from the metric.

        Raises:
          InputError: an argument is out of range.
        """
        options: dict[str, Any] = {"factor": factor, "patience": patience, "min_delta": min_delta}
        options |= {"cooldown": cooldown, "min_lr": min_lr, "mode": mode}
        Plateau(monitor=monitor, **options)  # validates the arguments
        super().__init__(monitor, **options)

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """See base class.

        Raises:
          InputError: the learning rate is a schedule, which cannot be set, or the direction of the metric is unknown.
        """
        super().on_train_begin(logs)
        schedule = keras_internals.scheduled_learning_rate(self.model.optimizer)
        if schedule is not None:
            raise InputError(
                "ReduceLROnPlateau needs an optimizer whose learning rate is a number. Received: a "
                f"{type(schedule).__name__}. Remove the callback, or pass a number as the learning rate."
            )

    def _check(self, logs: Mapping[str, float]) -> None:
        """See base class. Also logs a reduction of the rate."""
        keras_logs: dict[str, Any] = dict(logs)
        keras.callbacks.ReduceLROnPlateau.on_epoch_end(self, self._step, keras_logs)  # adds the current rate
        old_rate = keras_logs.get("learning_rate", 0.0)  # missing with several optimizers
        new_rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)) if old_rate else 0.0
        if new_rate < old_rate and (self.params or {}).get("is_chief", True):
            period = count_of(max(self.patience, 1), self._unit)
            text = "Reducing the learning rate from %.3g to %.3g at step %d: %s has not improved for %s."
            _log.info(text, old_rate, new_rate, self._step, self.monitor, period)


def check_monitored_metrics(
    callbacks: Sequence[keras.callbacks.Callback], best: str, program: Program, evaluates: bool
) -> tuple[str, str]:
    """Checks the metrics that the callbacks of this module monitor in a run, and the metric of the best checkpoint.

    `best` is `Checkpoints.best`, "" for none, and `evaluates` indicates whether the run has data to evaluate.

    Returns the metric of the best checkpoint and its direction, "min" or "max"; two empty strings if `best` is empty.
    Raises `InputError` if the run does not measure a metric, or its direction is unknown.
    """
    for callback in callbacks:
        if isinstance(callback, EvaluationMonitor):
            _direction(callback.monitor, callback.mode, program, evaluates)
    if not best:
        return "", ""
    monitor = parse_monitor(best)
    return monitor.metric, _direction(monitor.metric, monitor.mode, program, evaluates)


def _direction(metric: str, mode: str, program: Program, evaluates: bool) -> str:
    metric_names = ["loss", *program.metrics.results([np.zeros(v.shape) for v in program.metrics.variables])]
    if metric.startswith("val_") and not evaluates:
        raise InputError(
            "Monitoring a metric of an evaluation requires validation data. Received: "
            f"{metric}, without validation data. Pass validation data, or monitor {metric.removeprefix('val_')}."
        )
    valid_names = [f"val_{name}" for name in metric_names if evaluates] + metric_names
    if metric not in valid_names:
        raise InputError(
            f"A monitored metric must be one that the run computes. Received: {metric}.{nearest(metric, valid_names)}"
        )
    callback = keras.callbacks.EarlyStopping(metric, mode=mode)
    callback.set_model(program.model)
    return direction_of(callback)
