"""The attributes of Keras's callbacks that are state. A release of Keras that adds some fails here."""

import ast
import inspect
import textwrap

import keras
import numpy as np
import pytest

from tfdist import keras_internals
from tfdist.keras_internals.callbacks import _STATE

OF_THE_PROGRAM = {
    "__init__",
    "_init_profile_batch",
    "set_model",
    "set_params",
}  # attributes assigned there are set again by each start
NOT_STATE = {
    # Set when the metrics are known; it determines the sign of `min_delta`.
    "MonitorCallback": {"monitor_op", "min_delta"},
    # Set by `on_epoch_begin`, which is called again.
    "ModelCheckpoint": {"_current_epoch"},
    # An open file, and its columns.
    "CSVLogger": {"append_header", "csv_file", "keys", "writer"},
    # The terminal.
    "ProgbarLogger": {"_called_in_fit", "progbar", "seen", "target"},
    # Times, open writers, a running profile, and a graph that each start writes once.
    "TensorBoard": {
        "_batch_start_time",
        "_batch_trace_context",
        "_epoch_start_time",
        "_is_tracing",
        "_previous_epoch_iterations",
        "_profiler_started",
        "_should_write_train_graph",
        "_summary_module",
    },
}
CALLBACKS = [
    kind
    for kind in vars(keras.callbacks).values()
    if inspect.isclass(kind) and issubclass(kind, keras.callbacks.Callback) and kind is not keras.callbacks.Callback
]


def changed_in_training(kind):
    """Returns the attributes that methods assign, by the class that defines the methods."""
    found = {}
    for one in (base for base in kind.__mro__ if base.__module__.startswith("keras.")):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        methods = [method for method in tree.body if getattr(method, "name", "__init__") not in OF_THE_PROGRAM]
        stores = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Attribute))
        found[one.__name__] = {
            node.attr for node in stores if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
    return found


@pytest.mark.parametrize("kind", [kind for kind in CALLBACKS if kind.__name__ != "CallbackList"])
def test_every_attribute_that_training_assigns_is_state_or_is_named_here(kind):
    changed = changed_in_training(kind)
    changed.pop("Callback", None)
    left = {name for owner, names in changed.items() for name in names - NOT_STATE.get(owner, set())}
    in_place = {"history"} if kind is keras.callbacks.History else set()
    assert left | in_place == set(_STATE.get(kind, ()))


def test_nothing_else_is_set():
    backup = keras.callbacks.BackupAndRestore("mine")
    keras_internals.restore_callback(
        backup, {"backup_dir": "src", "_weights_path": "x", "_current_epoch": 2, "more": 1}
    )
    assert (backup.backup_dir, backup._weights_path, backup._current_epoch) == ("mine", "mine/latest.weights.h5", 2)
    assert not hasattr(backup, "more")


def test_a_best_value_has_its_comparison():
    """`ModelCheckpoint` may compare before the end of an epoch; the sign of `min_delta` must change only once."""
    best = keras.callbacks.ModelCheckpoint("best.keras", "loss", save_best_only=True, save_freq=2)
    for _ in range(2):
        keras_internals.restore_callback(best, {"best": 0.5})
    assert best._is_improvement(0.4, best.best) and not best._is_improvement(0.6, best.best)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=0.25)
    for _ in range(2):
        stop.on_train_begin()
        keras_internals.restore_callback(stop, {"best": 0.5})
    assert stop.min_delta == -0.25


@pytest.mark.parametrize(
    ("metric", "mode", "direction"),
    [
        *(("val_loss", "auto", "min"), ("val_accuracy", "auto", "max"), ("accuracy", "auto", "max")),
        *(("val_mean_absolute_error", "auto", "min"), ("val_accuracy", "min", "min"), ("val_other", "auto", "")),
    ],
)
def test_what_is_better_is_inferred_as_by_keras(metric, mode, direction):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=["accuracy", "mean_absolute_error"])
    model.test_on_batch(np.zeros((1, 2)), np.zeros((1, 1)))
    callback = keras.callbacks.EarlyStopping(metric, min_delta=0.5, mode=mode)
    callback.set_model(model)
    assert [keras_internals.monitored_direction(callback) for _ in range(2)] == [direction] * 2
    assert callback.min_delta == (-0.5 if direction == "min" else 0.5)
