"""Falls of the learning rate at plateaus that are counted in evaluations, wherever in an epoch they are."""

import logging
from collections.abc import Mapping
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.errors.counts import count_of
from tfdist.grammar.decay import Plateau
from tfdist.trainer.counted_evaluations import CountsEvaluations

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
          mode: "min" or "max", what is better; "auto" to infer it from the metric.

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
          InputError: the optimizer has a schedule, whose rate cannot be set, or it is not known what is better.
        """
        super().on_train_begin(logs)
        schedule = keras_internals.scheduled_learning_rate(self.model.optimizer)
        if schedule is not None:
            raise InputError(
                "ReduceLROnPlateau needs an optimizer whose learning rate is a number. Received: a "
                f"{type(schedule).__name__}. Leave one of them out."
            )

    def _look(self, logs: Mapping[str, float]) -> None:
        """See base class; logs a fall."""
        given: dict[str, Any] = dict(logs)
        keras.callbacks.ReduceLROnPlateau.on_epoch_end(self, self._step, given)  # adds the rate before
        before = given.get("learning_rate", 0.0)  # none of several optimizers
        after = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)) if before else 0.0
        if after < before and (self.params or {}).get("is_chief", True):
            what = "evaluation" if self._of_evaluations else "epoch"
            _log.info(
                "The learning rate falls from %.3g to %.3g at step %d: %s has not improved for %s.",
                before,
                after,
                self._step,
                self.monitor,
                count_of(max(self.patience, 1), what),
            )
