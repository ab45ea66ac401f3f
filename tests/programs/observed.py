"""Runs a script like `python SCRIPT`, and records its results: those of Keras's methods, and weights.

python observed.py DIRECTORY [--plain] [--quiet] [--rows-differ] [--seed=N] SCRIPT [ARGUMENTS]

With --quiet, random layers return their inputs, and random numbers that the script itself draws are the same in every row or,
with --rows-differ, determined by the row's index in the batch, so that they do not depend on the replica. --plain means a run
without tfdist, the reference, in which those defects of plain Keras are fixed that would cause differences
(`tests/traps/keras_fit_test.py`). --seed is added to the script's seeds.
"""

import functools
import os
import pathlib
import pickle
import runpy
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Imported modules do not show whether a run is plain: a forked process has always imported tfdist.
PLAIN = "--plain" in sys.argv
ROWS_DIFFER = "--rows-differ" in sys.argv
METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
RANDOM_LAYERS = (
    "Dropout SpatialDropout1D SpatialDropout2D GaussianDropout GaussianNoise RandomBrightness RandomContrast RandomFlip"
    " RandomRotation RandomTranslation RandomZoom"
).split()


class Observer:
    """Records a script's models, and what their methods returned."""

    def __init__(self) -> None:
        self.results: list[tuple[str, Any]] = []
        self.models: dict[int, keras.Model] = {}
        self._depth = 0

    @property
    def in_keras(self) -> bool:
        return self._depth > 0

    def watch(self) -> None:
        """Starts to record all outermost calls of Keras's methods."""
        for name in METHODS:
            setattr(keras.Model, name, self._watched(name, getattr(keras.Model, name)))

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            self.models[id(model)] = model
            self._depth += 1
            try:
                found = method(model, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                self.results.append((name, plain(found)))
            return found

        return call

    def outcome(self, script_globals: dict[str, Any]) -> dict[str, Any]:
        """Returns the results in order, by method, and the weights of all models."""
        made = {id(value): value for value in script_globals.values() if isinstance(value, keras.Model)}
        models = [model for model in (self.models | made).values() if model.weights]
        return {
            "results": [{name: found} for name, found in self.results],
            "weights": [[np.asarray(weight) for weight in model.get_weights()] for model in models],
        }


def plain(found: Any) -> Any:
    """Returns a result as plain structures of arrays."""
    if isinstance(found, keras.callbacks.History):
        found = {name: values for name, values in found.history.items() if "lr" not in name}
    return keras.tree.map_structure(np.asarray, found)


def be_quiet() -> None:
    """Removes the randomness of random layers, and of random numbers that a script draws itself."""
    for name in RANDOM_LAYERS:
        getattr(keras.layers, name).call = _passed_on
    for module in (keras.random, tf.random):
        for name in ("normal", "uniform"):
            setattr(module, name, functools.partial(_drawn, uniform=name == "uniform"))


def fix_keras(observer: Observer) -> None:
    """Fixes the defects of plain Keras that tfdist does not have; a script's own loop gets what Keras computes."""
    keras.Model.make_train_function = _counted(keras.Model.make_train_function, "train_function")
    keras.Model.make_test_function = _counted(keras.Model.make_test_function, "test_function")
    keras.Model.get_metrics_result = _copied(keras.Model.get_metrics_result)
    keras.optimizers.Optimizer.apply = _dense(keras.optimizers.Optimizer.apply, observer)


def _dense(apply: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    """Patches `apply` to sum gradients of repeated rows first; Keras's Adam and RMSprop square each of them separately."""

    @functools.wraps(apply)
    def dense_apply(optimizer: keras.Optimizer, grads: Any, *args: Any, **kwargs: Any) -> Any:
        if observer.in_keras:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        return apply(optimizer, grads, *args, **kwargs)

    return dense_apply


def _counted(make: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Patches Keras's functions so that the last call, which finds no batch in data of unknown length, is not counted."""

    @functools.wraps(make)
    def make_function(model: keras.Model, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        function = getattr(model, name)

        def counted(iterator: Any) -> Any:
            counts = [*model.metrics_variables, *([model.optimizer.iterations] if name == "train_function" else [])]
            before = [np.array(variable) for variable in counts]
            try:
                return function(iterator)
            except tf.errors.OutOfRangeError:
                for variable, value in zip(counts, before, strict=True):
                    variable.assign(value)
                raise

        setattr(model, name, counted)

    return make_function


def _copied(results: Callable[..., Any]) -> Callable[..., Any]:
    """Patches `get_metrics_result` to copy results that are variables, which would change when validation begins."""

    @functools.wraps(results)
    def get_metrics_result(model: keras.Model) -> Any:
        return keras.tree.map_structure(tf.identity, results(model))

    return get_metrics_result


def _passed_on(layer: keras.Layer, inputs: Any, *_: Any, **__: Any) -> Any:
    return inputs


def _drawn(
    shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, *_: Any, uniform: bool = False, **given: Any
) -> tf.Tensor:
    """Returns numbers that depend on their position in the batch only, not on the replica."""
    minval, maxval = given.get("mean", minval), given.get("stddev", maxval)
    shape = tf.cast(tf.convert_to_tensor(shape), tf.int32)
    columns = tf.range(tf.cast(tf.reduce_prod(shape[1:]), "float64"))
    rows = tf.range(tf.cast(tf.reduce_prod(shape[:1]), "float64"))
    rows = rows + _first_row() if ROWS_DIFFER else rows * 0.0
    wave = tf.reshape(tf.sin(1.0 + columns + 0.7 * rows[:, None]), shape)
    values = minval + (maxval - minval) * (wave + 1.0) / 2.0 if uniform else minval + maxval * wave
    return tf.cast(values, given.get("dtype") or dtype or keras.config.floatx())


def _first_row() -> Any:
    """Returns the index in the batch of this replica's first row."""
    if PLAIN:
        return 0.0
    from tfdist.data.row_partition import traced_row_range
    from tfdist.keras_fit import one_device

    replica = one_device.current_replica()
    if replica is None:
        return 0.0
    return tf.cast(
        traced_row_range(replica.batch_size, replica.collectives.rank, replica.collectives.size)[0], "float64"
    )


def main(directory: str, *arguments: str) -> None:
    options = [argument for argument in arguments if argument.startswith("--")]
    script, *rest = [argument for argument in arguments if argument not in options]
    offset = next((int(option.partition("=")[2]) for option in options if option.startswith("--seed=")), 0)
    set_seed = keras.utils.set_random_seed
    keras.utils.set_random_seed = lambda seed: set_seed(seed + offset)
    keras.utils.set_random_seed(0)
    observer = Observer()
    if PLAIN:
        fix_keras(observer)
    if "--quiet" in options:
        be_quiet()
    observer.watch()
    sys.argv = [script, *rest]
    found = runpy.run_path(script, run_name="__main__")
    path = pathlib.Path(directory, f"{os.getpid()}.pickle")
    path.write_bytes(pickle.dumps(observer.outcome(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
