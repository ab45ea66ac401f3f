"""Early stopping that counts evaluations, wherever in an epoch they are."""

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.errors import InputError
from tfdist.errors.counts import count_of
from tfdist.errors.number_checks import is_integer
from tfdist.grammar.monitor import MODES
from tfdist.trainer.counted_evaluations import CountsEvaluations


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
        self._looks = 0
        self.best_step = self.stopped_step = 0

    @property
    def reason(self) -> str:
        """Why the run was stopped, such as `early stopping at step 90: val_loss has not ...`; empty if it was not."""
        if not self.stopped_step:
            return ""
        what = "evaluation" if self._of_evaluations else "epoch"
        return (
            f"early stopping at step {self.stopped_step}: {self.monitor} has not improved for "
            f"{count_of(self.wait, what)} since step {self.best_step}"
        )

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """See base class."""
        super().on_train_begin(logs)
        self._looks = 0
        self.best_step = self.stopped_step = 0

    def _look(self, logs: Mapping[str, float]) -> None:
        """See base class."""
        stopped_before = self.stopped_epoch
        keras.callbacks.EarlyStopping.on_epoch_end(self, self._looks, dict(logs))  # looks take the place of epochs
        self._looks += 1
        if self.wait == 0:
            self.best_step = self._step
        if self.stopped_epoch != stopped_before:
            self.stopped_step = self._step

    def state_dict(self) -> dict[str, Any]:
        """See base class."""
        own = {"best_step": self.best_step, "stopped_step": self.stopped_step, "looks": self._looks}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See base class."""
        super().load_state_dict(state)
        self.best_step, self.stopped_step = state["best_step"], state["stopped_step"]
        self._looks = state["looks"]
