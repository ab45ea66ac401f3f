"""The best value of a metric in a run, and the step at which it was reached."""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfdist.checkpoint.format import Checkpoint, CheckpointError, complete_checkpoints, step_of
from tfdist.coordination import Group, Json
from tfdist.coordination.group import LONG_SECONDS
from tfdist.errors import InputError
from tfdist.storage import AnyPath, StoragePath

_log = logging.getLogger(__name__)


class BestValue(NamedTuple):
    """The best value of a metric so far."""

    metric: str  # name of the metric, as in Keras's logs
    mode: str  # "min" or "max", the better direction
    value: float  # its best value
    step: int  # number of completed updates when the value was measured

    def __str__(self) -> str:
        """Returns `val_accuracy 0.9861 at step 80`."""
        return f"{self.metric} {self.value:.4f} at step {self.step}"


class BestTracker:
    """Tracks the best value of a metric, which is the same on every process.

    Attributes:
      directory: directory of the checkpoints.
      best: the best value so far; None before the first one.
    """

    def __init__(self, directory: str, metric: str, mode: str, initial: BestValue | None = None):
        """Initializes the tracker; `initial` is a resumed run's best value, ignored if it is for another metric or mode."""
        self.directory = directory
        self._metric, self._mode = metric, mode
        self.best = initial if initial and initial[:2] == (metric, mode) else None

    def observe(self, step: int, logs: Mapping[str, float]) -> None:
        """Updates the best value from `logs`; an equal, infinite or NaN value is not an improvement."""
        value = float(logs.get(self._metric, math.nan))
        sign = 1 if self._mode == "max" else -1
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best.value):
            self.best = BestValue(self._metric, self._mode, value, step)


def checkpoint_of(best: BestValue, directory: AnyPath) -> StoragePath | None:
    """Returns the checkpoint of the best step in a directory of checkpoints; None if there is none."""
    return next((path for path in complete_checkpoints(directory) if step_of(path) == best.step), None)


def best_checkpoint(tracker: BestTracker | None, step: int, group: Group) -> tuple[BestValue | None, str]:
    """Returns the best value and the path of its checkpoint, which is empty if `step` is the best step.

    The result is the same on every process. Without an intact checkpoint, logs a warning and returns None and "".

    Raises:
      InputError: there is no best value.
    """
    if tracker is None or tracker.best is None:
        raise InputError(
            "`load_best` must be called after a fit with checkpoints=Checkpoints(best=...) that measured the metric. "
            f"Received: a trainer {'whose fit did not measure the metric' if tracker else 'without such a fit'}."
        )
    best, intact_path = tracker.best, ""
    if best.step == step:
        return best, ""
    if group.rank == 0:
        try:
            path = checkpoint_of(best, tracker.directory)
            if path is None:
                raise FileNotFoundError(f"It was not found in {tracker.directory}.")
            Checkpoint.open(path).verify()
            intact_path = str(path)
        except (CheckpointError, OSError) as error:
            _log.warning("The checkpoint of the best step, %s, cannot be used. %s", best, error)
    intact_path = group.broadcast("checkpoints/best/intact", intact_path, LONG_SECONDS)
    return (best if intact_path else None), intact_path


def parse_best_value(values: Mapping[str, Any]) -> BestValue | None:
    """Returns the best value in a checkpoint's `values`, or None; raises `TypeError` or `ValueError` if it is invalid."""
    items: Json = values.get("best")
    if items is None:
        return None
    if not isinstance(items, list) or [type(item) for item in items] != [str, str, float, int]:
        raise TypeError(f"the best value is {items!r:.60}")
    return BestValue(*items)
