"""Callbacks that look at each evaluation, wherever in an epoch it is."""

from collections.abc import Mapping
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.errors import InputError


class CountsEvaluations(keras.callbacks.Callback):
    """Mixin of a Keras callback that monitors a metric and looks at the end of each epoch.

    With it, the callback looks at each evaluation if it monitors a `val_` metric, and else at the end of each epoch. It
    comes before Keras's class among the bases, whose `on_epoch_end` is then called by `_look` alone.
    """

    monitor: str  # of Keras's class
    mode: str
    _step = 0

    @property
    def _of_evaluations(self) -> bool:
        return self.monitor.startswith("val_")

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """See base class.

        Raises:
          InputError: it is not known what is better.
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
        if self._of_evaluations:
            self._look(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """See base class."""
        # Keras's own `fit` has the results of an evaluation here, and reports no evaluation otherwise.
        if not (self._of_evaluations and (self.params or {}).get("reports_evaluations")):
            self._look(logs or {})

    def _look(self, logs: Mapping[str, float]) -> None:
        """Calls `on_epoch_end` of Keras's class with the results, of which one is monitored."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that Keras's class does not have, for a checkpoint."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self._step = state["step"]


def direction_of(callback: keras.callbacks.Callback) -> str:
    """Returns "min" or "max", what is better for the metric of a callback, which has its model.

    Args:
      callback: a `keras.callbacks.EarlyStopping` or `ReduceLROnPlateau`.

    Raises:
      InputError: Keras does not know it.
    """
    direction = keras_internals.monitored_direction(callback)
    if not direction:
        raise InputError(
            "Cannot infer whether higher or lower values of a metric are better. Received: "
            f"{callback.monitor}. Add mode=max or mode=min, as in "
            f"{callback.monitor}(mode=max)."
        )
    return direction
