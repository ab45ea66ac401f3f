"""Early stopping that counts evaluations, wherever in an epoch they are."""

from collections.abc import Mapping
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer
from tfdist.grammar.monitor import MODES


class EarlyStopping(keras.callbacks.EarlyStopping):
    """`keras.callbacks.EarlyStopping` whose patience is in evaluations, at whichever steps these are.

    Keras's own looks at the end of each epoch, where it finds no result of an evaluation if `Schedule.eval_every` has
    set other times. This one looks at each evaluation if it monitors a `val_` metric, and else at the end of each
    epoch. The ranks stop at the same step, its state is saved with the run, and a run that it has stopped stays so when
    it resumes.
    """

    def __init__(self, monitor: str = "val_loss", *, patience: int = 3, min_delta: float = 0.0, mode: str = "auto"):
        """Initializes the callback.

        Args:
          monitor: name of the metric; `val_` and its name for one of an evaluation.
          patience: number of evaluations without an improvement after which training stops.
          min_delta: smallest change that counts as an improvement.
          mode: "min" or "max", what is better; "auto" to infer it from the metric.

        Raises:
          InputError: `patience` or `mode` is something else.
        """
        if not is_integer(patience) or patience < 0:
            raise InputError(f"`patience` must be an integer of at least 0. Received: {patience!r}.")
        if mode not in MODES:
            raise InputError(f"`mode` must be {', '.join(MODES[:-1])} or {MODES[-1]}. Received: {mode!r}.")
        super().__init__(monitor, min_delta=min_delta, patience=patience, mode=mode)
        self._of_evaluations = monitor.startswith("val_")
        self._is_told = False
        self._step = self._looks = 0
        self.best_step = self.stopped_step = 0

    @property
    def reason(self) -> str:
        """Why the run was stopped, such as `early stopping at step 90: val_loss has not ...`; empty if it was not."""
        if not self.stopped_step:
            return ""
        what = "evaluation" if self._of_evaluations else "epoch"
        return (
            f"early stopping at step {self.stopped_step}: {self.monitor} has not improved for {self.wait} "
            f"{what}{'' if self.wait == 1 else 's'} since step {self.best_step}"
        )

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """See base class.

        Raises:
          InputError: it is not known what is better.
        """
        super().on_train_begin(logs)
        self._step = self._looks = 0
        self.best_step = self.stopped_step = 0
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
        self._is_told = True
        if self._of_evaluations:
            self._look(step, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """See base class."""
        if not (self._of_evaluations and self._is_told):  # Keras's `fit` does not tell of evaluations otherwise
            self._look(self._step, logs or {})

    def _look(self, step: int, logs: Mapping[str, float]) -> None:
        stopped_before = self.stopped_epoch
        super().on_epoch_end(self._looks, dict(logs))  # in which looks take the place of epochs
        self._looks += 1
        if self.wait == 0:
            self.best_step = step
        if self.stopped_epoch != stopped_before:
            self.stopped_step = step

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that its base class does not have, for a checkpoint."""
        return {
            "best_step": self.best_step,
            "stopped_step": self.stopped_step,
            "looks": self._looks,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self.best_step, self.stopped_step = state["best_step"], state["stopped_step"]
        self._looks, self._step = state["looks"], state["step"]


def direction_of(callback: keras.callbacks.EarlyStopping | keras.callbacks.ReduceLROnPlateau) -> str:
    """Returns "min" or "max", what is better for the metric of a callback, which has its model.

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
