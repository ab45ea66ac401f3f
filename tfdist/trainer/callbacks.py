"""Keras callbacks with several processes: equal logs everywhere, files written by the chief, one decision to stop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.config.sync import FedAvg
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.step.validation import inner_optimizer
from tfdist.trainer.program import Program

WRITE_FILES = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)


class _EpochLogs(keras.callbacks.Callback):
    """Stores the logs of the last epoch; it is the last callback, so that the others may have changed them."""

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
        """Creates the list; `params`: parameters that Keras passes to callbacks (`epochs`, `steps`)."""
        model.stop_training = False
        self._model = model
        self._group = strategy.group
        # Also if only some processes have callbacks, as in `callbacks=[...] if rank == 0 else []`.
        self._any = any(strategy.group.gather("callbacks/any", bool(callbacks), deadline=float("inf")))
        self.callbacks = callbacks_of_process(callbacks, strategy)
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
        """Calls `on_evaluation` of the callbacks that have it, with the results under their `val_` names."""
        for callback in self.callbacks:
            if callable(getattr(callback, "on_evaluation", None)):
                callback.on_evaluation(step, dict(logs))

    def stopped(self, step: int) -> bool:
        """Returns whether a callback of any process requests a stop; all processes must call it at the same step."""
        if not self._any:
            return False
        own = bool(self._model.stop_training)
        # No deadline: a callback may take long, even on the chief only. The watchdog detects one that never returns.
        everyone = self._group.gather(f"callbacks/stop/{step}", own, deadline=float("inf"))
        self._model.stop_training = any(everyone)
        return self._model.stop_training


def callbacks_of_process(
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


def run_evaluation(
    callbacks: Callbacks | keras.callbacks.CallbackList, batches: int, evaluate: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Evaluates, and calls the methods of callbacks for it, for all batches as one: they are one call of a compiled loop."""
    callbacks.on_test_begin()
    callbacks.on_test_batch_begin(0)
    results = evaluate()
    callbacks.on_test_batch_end(batches - 1, results)
    callbacks.on_test_end(results)
    return results


def validation_logs(results: Mapping[str, float]) -> dict[str, float]:
    """Returns an evaluation's results under the names that Keras callbacks monitor."""
    return {f"val_{name}": value for name, value in results.items()}


def check_callback_weights(callbacks: Sequence[keras.callbacks.Callback], program: Program) -> None:
    """Checks that callbacks of `fit` which save or restore weights would have those that were evaluated.

    With a moving average of the weights, and between exchanges of replicas that train locally, evaluations have averages,
    while callbacks read and assign the weights that are trained. Those of the first of several replicas that train locally
    are neither evaluated nor enough to continue from, so that no callback may save them; with a moving average, they are
    what is trained.

    Raises:
      InputError: a callback would keep, or restore, other weights.
    """
    averages = _averages(program)
    for callback in callbacks if averages else []:
        incompatible = _incompatible(callback, _is_local(program))
        if incompatible:
            received, remedy = incompatible
            raise InputError(
                f"A callback cannot keep the weights that are evaluated with {averages}, which are averages. Received: "
                f"{received}. Use {remedy}."
            )


def _incompatible(callback: keras.callbacks.Callback, is_local: bool) -> tuple[str, str] | None:
    """Returns a callback that would keep other weights, as in a message, and the remedy; None for any other."""
    name, best = type(callback).__name__, "Checkpoints(best=...) with trainer.load_best()"
    match callback:
        case keras.callbacks.EarlyStopping() if callback.restore_best_weights:
            return f"{name}(restore_best_weights=True)", f"tfdist.EarlyStopping, and for the best weights {best}"
        case keras.callbacks.ModelCheckpoint() if callback.save_best_only:
            return f"{name}(save_best_only=True)", best
        case keras.callbacks.ModelCheckpoint() if is_local:
            return name, "Checkpoints(every=...), and trainer.save() for the model"
        case keras.callbacks.BackupAndRestore() if is_local:
            return name, "Checkpoints(every=...) with trainer.resume()"
    return None


def check_no_swap(callbacks: Sequence[keras.callbacks.Callback], program: Program) -> None:
    """Checks that no callback swaps the weights with their moving average, as evaluations have the average already.

    Raises:
      InputError: a callback does.
    """
    if _has_moving_average(program) and any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks):
        raise InputError(
            "Evaluations already use the moving average of the weights, and a callback would swap it out. Received: "
            "SwapEMAWeights. Leave it out; for other uses of the average, enter trainer.averaged_weights()."
        )


def _averages(program: Program) -> str:
    """Returns the options by which evaluations have averages; empty if they have the weights that are trained."""
    sync = [f"sync={program.settings.sync}"] if _is_local(program) else []
    return " and ".join(["ema"] * _has_moving_average(program) + sync)


def _is_local(program: Program) -> bool:
    """Returns whether replicas have weights of their own; between rounds of FedAvg, all have the global weights."""
    sync = program.settings.sync
    return sync.exchanges_weights and not isinstance(sync, FedAvg) and program.strategy.replicas > 1


def _has_moving_average(program: Program) -> bool:
    return bool(keras_internals.weight_averages(inner_optimizer(program.model.optimizer)))
