"""The metrics that a run is asked to watch: that they exist, and what is better."""

from collections.abc import Sequence

import keras
import numpy as np

from tfdist.checkpoint.best import Best, BestValue
from tfdist.checkpoint.manager import Checkpoints
from tfdist.errors import InputError
from tfdist.grammar.monitor import parse_best
from tfdist.grammar.spec import nearest
from tfdist.trainer.early_stopping import EarlyStopping, direction_of
from tfdist.trainer.program import Program


def check_monitored(callbacks: Sequence[keras.callbacks.Callback], program: Program, evaluates: bool) -> None:
    """Raises `InputError` if an `EarlyStopping` of this library monitors what the run does not measure.

    Keras's own callbacks warn of that themselves.
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            _check(callback.monitor, program, evaluates)


def best_value(
    checkpoints: Checkpoints | None, program: Program, before: Best | None, evaluates: bool
) -> BestValue | None:
    """Returns what follows the metric of `Checkpoints.best`; None if there is none.

    Args:
      checkpoints: how the run is saved.
      program: what is trained.
      before: best value of the run that resumes.
      evaluates: whether the run evaluates.

    Raises:
      InputError: the run does not measure it, or it is not known what is better.
    """
    if checkpoints is None or not checkpoints.best:
        return None
    monitor = parse_best(checkpoints.best)
    _check(monitor.metric, program, evaluates)
    asked = keras.callbacks.EarlyStopping(monitor.metric, mode=monitor.mode)
    asked.set_model(program.model)
    return BestValue(checkpoints.directory, monitor.metric, direction_of(asked), before)


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
