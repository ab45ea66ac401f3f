"""State of Keras's callbacks: the attributes that training changes and that a resumed run needs."""

from collections.abc import Mapping
from typing import Any

import keras

_SAVING = ("_batches_seen_since_last_saving", "_last_batch_seen", "best")

# Keras's other callbacks have none: `CSVLogger` and `ProgbarLogger` have what belongs to an open file or to the terminal, and
# `LearningRateScheduler` sets a variable of the optimizer. Names of files and directories are not state.
_STATE: dict[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.BackupAndRestore: ("_batches_seen_since_last_saving", "_current_epoch", "_last_batch_seen"),
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.ModelCheckpoint: _SAVING,
    keras.callbacks.OrbaxCheckpoint: ("_total_batches_seen", *_SAVING),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_test_batch", "_global_train_batch"),
}


def callback_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the attributes of one of Keras's callbacks, or of a subclass, that are state; {} if it has none."""
    names = {name for kind, names in _STATE.items() if isinstance(callback, kind) for name in names}
    return {name: value for name, value in vars(callback).items() if name in names}


def monitored_direction(callback: keras.callbacks.EarlyStopping | keras.callbacks.ReduceLROnPlateau) -> str:
    """Returns "min" or "max", what is better for the metric of a callback, which has its model; "" if Keras does not know.

    The callback uses the result from then on; Keras would ask only at the end of the first epoch.
    """
    if callback.monitor_op is None:
        try:
            callback._set_monitor_op()
        except ValueError:
            return ""
    return "max" if callback.monitor_op is keras.ops.greater else "min"


def restore_callback(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Sets the attributes of `callback_state` that `state` contains, and no others."""
    for name in callback_state(callback).keys() & state.keys():
        setattr(callback, name, state[name])
    if state.get("best") is not None and getattr(callback, "monitor_op", True) is None:
        callback._set_monitor_op()  # Keras does this when an epoch ends, which is too late for a save within the epoch
