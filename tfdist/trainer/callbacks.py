"""Runs Keras callbacks in several processes, with equal logs, files written by the chief, and a common decision to stop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.config.sync import FedAvg
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.step.validation import inner_optimizer
from tfdist.trainer.program import Program

FILE_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)


class Callbacks(keras.callbacks.CallbackList):
    """The Keras callbacks of one process."""

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model, strategy: Strategy, **params: Any
    ):
        """Creates the list; Keras passes `params` (`epochs`, `steps`) to the callbacks."""
        model.stop_training = False
        self._group = strategy.group
        # Some processes may have no callbacks, as in `callbacks=[...] if rank == 0 else []`.
        self._has_callbacks = any(strategy.group.gather("callbacks/any", bool(callbacks), deadline=float("inf")))
        self.of_process = callbacks_of_process(callbacks, strategy)
        self._epoch_logs: dict[str, Any] = {}
        # The last callback, because the others may change the logs.
        keep_logs = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: self._epoch_logs.update(logs))
        params |= {"reports_evaluations": True, "is_chief": strategy.is_chief}
        super().__init__([*self.of_process, keep_logs], model=model, **params)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> dict[str, Any]:
        """Calls `on_epoch_end`; returns the logs with what callbacks added, as in Keras's `History`."""
        self._epoch_logs = {}
        super().on_epoch_end(epoch, logs)
        return self._epoch_logs

    def on_evaluation(self, step: int, logs: Mapping[str, float]) -> None:
        """Calls `on_evaluation` of callbacks that define it. The names in `logs` have the prefix `val_`."""
        for callback in self.of_process:
            if callable(getattr(callback, "on_evaluation", None)):
                callback.on_evaluation(step, dict(logs))

    def should_stop(self, step: int) -> bool:
        """Returns whether a callback of any process requests a stop; every process must call this at the same step."""
        if not self._has_callbacks:
            return False
        # Without a deadline, because a callback may take long. The watchdog detects one that never returns.
        requests = self._group.gather(f"callbacks/stop/{step}", bool(self.model.stop_training), deadline=float("inf"))
        self.model.stop_training = any(requests)
        return self.model.stop_training


def callbacks_of_process(
    callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy, broadcasts_weights: bool = False
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks to run on this process: those that write files run only on the chief.

    Raises `InputError` if a callback does not work with several processes. `broadcasts_weights` indicates whether
    weights that the chief restores are broadcast to the other processes.
    """
    backs_up = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks)
    if strategy.cluster.size > 1 and backs_up and not broadcasts_weights:
        raise InputError(
            "Only one of several processes would restore its weights. Received: BackupAndRestore in a job of "
            f"{strategy.cluster.size} processes. Remove this callback."
        )
    if not strategy.trains_whole_model and any(getattr(c, "restore_best_weights", False) for c in callbacks):
        raise InputError(
            "A resumed pipeline cannot restore the best weights that a callback holds. Received: restore_best_weights=True. "
            "Remove this option, and use Checkpoints(best=...) and trainer.load_best()."
        )
    chief_reads = [
        type(c).__name__
        for c in callbacks
        if isinstance(c, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore)
        or getattr(c, "histogram_freq", None)
    ]
    if strategy.blocks.spans_processes and strategy.cluster.size > 1 and chief_reads:
        raise InputError(
            "On a mesh or a pipeline of several processes, the chief cannot read all weights by itself. Received: "
            f"{', '.join(chief_reads)}. Save the model on every process instead (trainer.save, or model.save with Keras's own "
            "fit)."
        )
    return [c for c in callbacks if strategy.is_chief or not isinstance(c, FILE_WRITERS)]


def run_evaluation(
    callbacks: keras.callbacks.CallbackList, batches: int, evaluate: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Evaluates; calls callbacks once for all batches, because a single call of a compiled loop evaluates all of them."""
    callbacks.on_test_begin()
    callbacks.on_test_batch_begin(0)
    results = evaluate()
    callbacks.on_test_batch_end(batches - 1, results)
    callbacks.on_test_end(results)
    return results


def check_callback_weights(callbacks: Sequence[keras.callbacks.Callback], program: Program) -> None:
    """Checks that callbacks that save, restore or swap weights use the evaluated weights.

    With a moving average of the weights, or if replicas train locally, evaluations use averages, whereas callbacks read
    and assign the training weights. With local training, callbacks access the weights of the first replica, which are
    neither evaluated nor sufficient to continue from, so no callback may save them. Raises `InputError` if a callback
    would save or restore weights other than those evaluated, or swap out the average.
    """
    sync, strategy = program.settings.sync, program.strategy
    # Between rounds of FedAvg, all replicas have the global weights.
    is_local = sync.exchanges_weights and not isinstance(sync, FedAvg) and strategy.replicas > 1
    has_average = bool(keras_internals.weight_averages(inner_optimizer(program.model.optimizer)))
    options = " and ".join(["ema"] * has_average + [f"sync={sync}"] * is_local)
    for callback in callbacks if options else []:
        name, best = type(callback).__name__, "Checkpoints(best=...) with trainer.load_best()"
        match callback:
            case keras.callbacks.SwapEMAWeights() if has_average:
                raise InputError(
                    "Evaluations already use the moving average of the weights, and a callback would swap it out. Received: "
                    "SwapEMAWeights. Remove it; for other uses of the average, enter the context trainer.averaged_weights()."
                )
            case keras.callbacks.EarlyStopping() if callback.restore_best_weights:
                name = f"{name}(restore_best_weights=True)"
                remedy = f"tfdist.EarlyStopping, and for the best weights {best}"
            case keras.callbacks.ModelCheckpoint() if callback.save_best_only:
                name, remedy = f"{name}(save_best_only=True)", best
            case keras.callbacks.ModelCheckpoint() if is_local:
                remedy = "Checkpoints(every=...), and trainer.save() for the model"
            case keras.callbacks.BackupAndRestore() if is_local:
                remedy = "Checkpoints(every=...) with trainer.resume()"
            case _:
                continue
        raise InputError(
            f"With {options}, averages of weights are evaluated, which a callback cannot store or restore. Received: {name}. "
            f"Use {remedy}."
        )
