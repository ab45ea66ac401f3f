"""Callbacks of Keras that keep or change weights, in runs that evaluate other weights than the model's variables have."""

from collections.abc import Sequence

import keras

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.grammar.sync import FedAvg
from tfdist.step.validation import inner_optimizer
from tfdist.trainer.program import Program


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
        found = _kept(callback, _is_local(program))
        if found:
            received, remedy = found
            raise InputError(
                f"A callback cannot keep the weights that are evaluated with {averages}, which are averages. Received: "
                f"{received}. Use {remedy}."
            )


def _kept(callback: keras.callbacks.Callback, is_local: bool) -> tuple[str, str] | None:
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
