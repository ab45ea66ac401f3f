"""Callbacks of Keras that keep or change weights, in runs that evaluate other weights than the model's variables have."""

from collections.abc import Sequence

import keras

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.grammar.sync import FedAvg
from tfdist.step.validation import inner_optimizer
from tfdist.trainer.program import Program


def check_callback_weights(callbacks: Sequence[keras.callbacks.Callback], program: Program) -> None:
    """Checks that callbacks of `fit` which keep the best weights would keep those that were evaluated.

    With a moving average of the weights, and between exchanges of replicas that train locally, evaluations have averages,
    while callbacks read and assign the weights that are trained, of the first replica.

    Raises:
      InputError: a callback would keep, or restore, other weights.
    """
    averages = _averages(program)
    if not averages:
        return
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
            kept, remedy = (
                "restore_best_weights=True",
                "tfdist.EarlyStopping, and for the best weights Checkpoints(best=...)",
            )
        elif isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only:
            kept, remedy = "save_best_only=True", "Checkpoints(best=...)"
        else:
            continue
        raise InputError(
            f"A callback cannot keep the weights that are evaluated with {averages}, which are averages. Received: "
            f"{type(callback).__name__}({kept}). Use {remedy} with trainer.load_best()."
        )


def check_no_swap(callbacks: Sequence[keras.callbacks.Callback], program: Program) -> None:
    """Checks that no callback swaps the weights with their moving average, as evaluations have the average already.

    Raises:
      InputError: a callback does.
    """
    if _has_moving_average(program) and any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks):
        raise InputError(
            "Evaluations have the moving average of the weights already, and a callback would swap it back. Received: "
            "SwapEMAWeights. Leave it out; trainer.averaged_weights() is a context for other uses of the average."
        )


def _averages(program: Program) -> str:
    """Returns the options by which evaluations have averages; empty if they have the weights that are trained."""
    sync = program.settings.sync
    # The rounds of FedAvg are whole steps, between which all replicas have the global weights.
    is_local = sync.exchanges_weights and not isinstance(sync, FedAvg) and program.strategy.replicas > 1
    return " and ".join(["ema"] * _has_moving_average(program) + [f"sync={sync}"] * is_local)


def _has_moving_average(program: Program) -> bool:
    return bool(keras_internals.weight_averages(inner_optimizer(program.model.optimizer)))
