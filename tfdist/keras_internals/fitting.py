"""Accesses internals of Keras's `fit`: its functions, batches and callbacks, and traces with symbolic tensors."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec, nn
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.losses import losses
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from tensorflow.python.eager import context

from tfdist.errors import InputError
from tfdist.keras_internals.patching import Context, patched

# Names of TensorFlow classes that are not exported.
_BATCH_TYPES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_RebatchDataset")
_ELEMENT_TYPES = ("_UnbatchDataset", "_TensorSliceDataset", "_RangeDataset")
_ELEMENTWISE_TYPES = ("_MapDataset", "_ParallelMapDataset", "_PrefetchDataset", "_OptionsDataset", "CacheDataset")
_FLAT_MAP_TYPES = ("_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset", "_GroupByWindowDataset")


class AdaptedData(NamedTuple):
    """Data that Keras's `fit` takes, as a dataset of batches."""

    batches: tf.data.Dataset  # one epoch
    first: Any  # the first batch, as NumPy arrays
    length: int | None  # number of batches in an epoch; None if infinite
    is_reiterable: bool  # whether every iterator starts at the beginning


def array_of(data: Any) -> np.ndarray:
    """Converts data to an array as Keras's `fit` does: floating-point data to floatx, a pandas Series to a column."""
    is_convertible = isinstance(data, tf.Tensor) or type(data).__module__.partition(".")[0] == "pandas"
    data = data if is_convertible else np.asarray(data)
    try:
        sliceable = array_slicing.convert_to_sliceable(data)
    except (ValueError, TypeError):  # strings and objects
        return np.asarray(data)
    return np.asarray(sliceable.convert_to_numpy(sliceable.array))


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Infers from a dataset's operations, or else from its shapes, whether its elements are batches."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    if any(shape.rank == 0 for shape in shapes):
        return False
    source = dataset
    while source._inputs() and type(source).__name__ not in (*_BATCH_TYPES, *_ELEMENT_TYPES, *_FLAT_MAP_TYPES):
        source = source._inputs()[0]
    if type(source).__name__ in (*_BATCH_TYPES, *_ELEMENT_TYPES):
        return type(source).__name__ in _BATCH_TYPES
    return all(shape.rank is None or shape[0] is None for shape in shapes)


def count_rows(dataset: tf.data.Dataset, first_rows: int) -> int | None:
    """Returns the number of rows of a finite dataset of batches without reading it; None if unknown.

    The number is unknown if a mapped function has changed the number of rows of the first batch, which is now `first_rows`.
    """
    batches = int(dataset.cardinality())
    if batches < 0:
        return None
    static_rows = next(spec.shape[0] if spec.shape.rank else None for spec in tf.nest.flatten(dataset.element_spec))
    if static_rows is not None:
        return batches * int(static_rows)
    source = dataset
    while type(source).__name__ in _ELEMENTWISE_TYPES:
        [source] = source._inputs()
    if type(source).__name__ not in ("_BatchDataset", "_ParallelBatchDataset"):
        return None
    [examples] = source._inputs()
    rows, size = int(examples.cardinality()), int(source._batch_size)
    if source._drop_remainder:
        rows -= rows % size
    return rows if rows >= 0 and min(size, rows) == first_rows else None


def adapt_data(data: Any) -> AdaptedData:
    """Converts a Python generator or a data loader to batches, as Keras's `fit` does; raises `ValueError` like Keras."""
    adapter = data_adapters.get_data_adapter(data)
    batches = adapter.get_tf_dataset()
    is_generator = isinstance(adapter, data_adapters.GeneratorDataAdapter)
    first = adapter._first_batches[0] if is_generator else next(iter(batches.take(1)))
    return AdaptedData(batches, tf.nest.map_structure(np.asarray, first), adapter.num_batches, not is_generator)


_SAVING_STATE = ("_batches_seen_since_last_saving", "_last_batch_seen", "best")

# Attributes that are state. Other Keras callbacks have no state: attributes of `CSVLogger` and `ProgbarLogger` belong to a file
# or the terminal, and `LearningRateScheduler` sets a variable of the optimizer. File names are not state.
_STATE_ATTRIBUTES: dict[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.BackupAndRestore: ("_batches_seen_since_last_saving", "_current_epoch", "_last_batch_seen"),
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.ModelCheckpoint: _SAVING_STATE,
    keras.callbacks.OrbaxCheckpoint: ("_total_batches_seen", *_SAVING_STATE),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_test_batch", "_global_train_batch"),
}


def callback_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the attributes of a Keras callback, or of a subclass of one, that are state."""
    names = {name for kind, names in _STATE_ATTRIBUTES.items() if isinstance(callback, kind) for name in names}
    return {name: value for name, value in vars(callback).items() if name in names}


def monitored_direction(callback: keras.callbacks.EarlyStopping | keras.callbacks.ReduceLROnPlateau) -> str:
    """Returns "min" or "max" if a callback with a model minimizes or maximizes its metric; "" if unknown.

    Sets the direction in the callback, as Keras does at the end of the first epoch.
    """
    if callback.monitor_op is None:
        try:
            callback._set_monitor_op()
        except ValueError:
            return ""
    return "max" if callback.monitor_op is keras.ops.greater else "min"


def restore_callback(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Restores the attributes returned by `callback_state`."""
    for name in callback_state(callback).keys() & state.keys():
        setattr(callback, name, state[name])
    if state.get("best") is not None and getattr(callback, "monitor_op", True) is None:
        callback._set_monitor_op()  # Keras does this at the end of an epoch, which is too late for saves within it


def clear_strategy(model: keras.Model) -> None:
    """Removes the tf.distribute strategy from a model, with which Keras would read the data once more to build the model."""
    model._distribute_strategy = None


def compilation(model: keras.Model) -> Any:
    """Returns an object that changes with each `compile`; None before the first."""
    return model._loss_tracker if model.compiled else None


def initial_epoch(model: keras.Model) -> int:
    """Returns the epoch at which `fit` resumes, as set by a callback; 0 by default."""
    return model._initial_epoch or 0


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Sets the epoch at which the next `fit` resumes."""
    model._initial_epoch = epoch


def clear_functions(model: keras.Model) -> None:
    """Clears the functions that run steps, as `compile` does, so that Keras recreates them."""
    model.train_function = model.test_function = model.predict_function = None


global_seed = context.global_seed  # returns the seed set by `tf.random.set_seed`; None if not set


def loss_means(model: keras.Model) -> list[keras.metrics.Mean]:
    """Returns Keras's means over batches of the total loss and, if there are several losses, of each loss."""
    return [model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss is not None else [])]


def trace_symbolically(function: Callable[..., Any], batch: Any) -> None:
    """Calls a function of one batch with symbolic tensors, without changing variables.

    The function is called again if the first call fails, for example because of assignments inside a conditional. `batch` is a
    structure of `tf.TensorSpec`, with None for missing parts.
    """
    symbolic_batch = tf.nest.map_structure(
        lambda s: None if s is None else keras.KerasTensor(s.shape, s.dtype.name), batch
    )
    try:
        compute_output_spec(function, symbolic_batch)
    except InputError:
        raise
    except (AttributeError, TypeError, ValueError):
        trace = tf.function(lambda values: tf.nest.flatten(function(values)) and None, autograph=False)
        trace.get_concrete_function(batch)


_FUNCTION_MODULES = {"convert_binary_labels_to_hinge": losses, "conv": nn, "ctc_loss": nn, "depthwise_conv": nn}


@contextlib.contextmanager
def symbolic_graph(name: str) -> Iterator[Any]:
    """Context in which operations are added to a graph that is never run; yields the graph.

    In the scope of a tf.distribute strategy, but outside of replica functions, the strategy is hidden, because otherwise code
    could not differentiate with respect to mirrored variables.
    """
    with tf.__internal__.FuncGraph(name).as_default() as graph, SymbolicScope():
        if tf.distribute.in_cross_replica_context():
            graph._distribution_strategy_stack = []
        yield graph


def wrap_functions(wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> Context:
    """Context in which private functions of Keras are wrapped; `wrappers` maps the name of a function to its wrapper."""
    modules = [(_FUNCTION_MODULES[name], name, wrap) for name, wrap in wrappers.items()]
    return patched(*((module, name, wrap(getattr(module, name))) for module, name, wrap in modules))
