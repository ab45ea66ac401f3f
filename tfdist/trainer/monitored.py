"""The metrics that a run is asked to watch: that they exist, and what is better."""

from collections.abc import Sequence

import keras
import numpy as np

from tfdist.checkpoint.best import Best, BestValue
from tfdist.checkpoint.manager import Checkpoints
from tfdist.errors import InputError
from tfdist.grammar.monitor import parse_best
from tfdist.grammar.spec import nearest
from tfdist.trainer.counted_evaluations import CountsEvaluations, direction_of
from tfdist.trainer.program import Program


def check_monitored(callbacks: Sequence[keras.callbacks.Callback], program: Program, evaluates: bool) -> None:
    """Checks what this library's `EarlyStopping` and `ReduceLROnPlateau` monitor; Keras's own callbacks warn themselves.

    Raises:
      InputError: the run does not measure it, or it is not known what is better.
    """
    for callback in callbacks:
        if isinstance(callback, CountsEvaluations):
            _direction(callback.monitor, callback.mode, program, evaluates)


def best_metric(text: str, program: Program, evaluates: bool) -> tuple[str, str]:
    """Returns the metric whose best value is kept, and what is better, "min" or "max".

    Args:
      text: see `Checkpoints.best`.
      program: what is trained.
      evaluates: whether the run evaluates.

    Raises:
      InputError: the run does not measure it, or it is not known what is better.
    """
    monitor = parse_best(text)
    return monitor.metric, _direction(monitor.metric, monitor.mode, program, evaluates)


def watched(
    callbacks: Sequence[keras.callbacks.Callback],
    checkpoints: Checkpoints | None,
    program: Program,
    before: Best | None,
    evaluates: bool,
) -> BestValue | None:
    """Checks the metrics that a run watches; returns what follows that of `Checkpoints.best`, None without one.

    Args:
      callbacks: callbacks of the run.
      checkpoints: how it is saved.
      program: what is trained.
      before: the best value before.
      evaluates: whether the run evaluates.

    Raises:
      InputError: see `check_monitored`.
    """
    check_monitored(callbacks, program, evaluates)
    if checkpoints is None or not checkpoints.best:
        return None
    metric, mode = best_metric(checkpoints.best, program, evaluates)
    return BestValue(checkpoints.directory, metric, mode, before)


def _direction(metric: str, mode: str, program: Program, evaluates: bool) -> str:
    _check(metric, program, evaluates)
    asked = keras.callbacks.EarlyStopping(metric, mode=mode)
    asked.set_model(program.model)
    return direction_of(asked)


def _check(metric: str, program: Program, evaluates: bool) -> None:
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
