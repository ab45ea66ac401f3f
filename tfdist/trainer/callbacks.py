"""Keras callbacks with several processes: equal logs everywhere, files written by the chief, one decision to stop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError

WRITE_FILES = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)


class _EpochLogs(keras.callbacks.Callback):
    """Keeps the logs of the last epoch; the last callback, so that those before it may have changed them."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.logs = dict(logs or {})


class Callbacks:
    """The Keras callbacks of one process of the job.

    Attributes:
      callbacks: those that run on this process.
    """

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model, strategy: Strategy, **params: Any
    ):
        """Creates the list of callbacks.

        Args:
          callbacks: callbacks as passed on every process.
          model: model that is trained.
          strategy: strategy on which it is trained.
          **params: parameters that Keras passes to callbacks (`epochs`, `steps`).
        """
        model.stop_training = False
        self._model = model
        self._group = strategy.group
        # Also if only some processes have callbacks, as in `callbacks=[...] if rank == 0 else []`.
        self._any = any(strategy.group.gather("callbacks/any", bool(callbacks), deadline=float("inf")))
        self.callbacks = chosen(callbacks, strategy)
        self._epoch = _EpochLogs()
        self._list = keras.callbacks.CallbackList(
            [*self.callbacks, self._epoch], model=model, reports_evaluations=True, is_chief=strategy.is_chief, **params
        )

    def __getattr__(self, name: str) -> Any:
        """Forwards events to `keras.callbacks.CallbackList`."""
        return getattr(self._list, name)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> dict[str, Any]:
        """Calls `on_epoch_end`; returns the logs with what callbacks have added, as in Keras's `History`."""
        self._list.on_epoch_end(epoch, logs)
        return self._epoch.logs

    def on_evaluation(self, step: int, logs: Mapping[str, float]) -> None:
        """Tells the callbacks that have `on_evaluation` the results of an evaluation, under their `val_` names."""
        for callback in self.callbacks:
            if callable(getattr(callback, "on_evaluation", None)):
                callback.on_evaluation(step, dict(logs))

    def stopped(self, step: int) -> bool:
        """Returns whether a callback of any process requests a stop; all processes must call it at the same step."""
        if not self._any:
            return False
        mine = bool(self._model.stop_training)
        # No deadline: a callback may take long, even on the chief only. Detecting one that never returns is up to the
        # watchdog.
        everyone = self._group.gather(f"callbacks/stop/{step}", mine, deadline=float("inf"))
        self._model.stop_training = any(everyone)
        return self._model.stop_training


def chosen(
    callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy, restores: bool = False
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that run on this process: those that write files run on the chief only.

    Args:
      callbacks: callbacks as passed on every process.
      strategy: strategy on which the model is trained.
      restores: whether weights that the chief restores are sent to the other processes.

    Raises:
      InputError: a callback does not work with several processes.
    """
    backs_up = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks)
    if strategy.cluster.size > 1 and backs_up and not restores:
        raise InputError(
            "Only one of several processes would restore its weights. Received: BackupAndRestore in a job of "
            f"{strategy.cluster.size} processes. Leave it out."
        )
    if not strategy.trains_whole_model and any(getattr(c, "restore_best_weights", False) for c in callbacks):
        raise InputError(
            "A resumed pipeline cannot restore the best weights that a callback holds. Received: restore_best_weights=True. "
            "Leave it out, and use Checkpoints(best=...) and trainer.load_best()."
        )
    if strategy.blocks.spans_processes and strategy.cluster.size > 1:
        _refuse_reads_on_the_chief(callbacks)
    return [c for c in callbacks if strategy.is_chief or not isinstance(c, WRITE_FILES)]


def _refuse_reads_on_the_chief(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises `InputError` for callbacks that read variables on the chief only, which takes all processes on a mesh."""
    reading = [
        type(c).__name__
        for c in callbacks
        if isinstance(c, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore)
        or getattr(c, "histogram_freq", None)
    ]
    if reading:
        raise InputError(
            "On a mesh or a pipeline of several processes the chief cannot read weights alone. Received: "
            f"{', '.join(reading)}. Save the model on every process instead (trainer.save, or model.save with Keras's own fit)."
        )


def evaluated(
    callbacks: Callbacks | keras.callbacks.CallbackList, batches: int, evaluate: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Evaluates, and calls the methods of callbacks for it, for all batches as one: they are one call of a compiled loop.

    Args:
      callbacks: callbacks of this process.
      batches: number of batches.
      evaluate: returns the results.
    """
    callbacks.on_test_begin()
    callbacks.on_test_batch_begin(0)
    results = evaluate()
    callbacks.on_test_batch_end(batches - 1, results)
    callbacks.on_test_end(results)
    return results


def validation_logs(results: Mapping[str, float]) -> dict[str, float]:
    """Returns an evaluation's results under the names that Keras callbacks monitor."""
    return {f"val_{name}": value for name, value in results.items()}
