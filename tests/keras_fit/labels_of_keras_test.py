"""How the gradients of Keras's own layers and losses, and of usual code of users, are combined over replicas, as labels say."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.selection import quick
from tfdist.errors import InputError
from tfdist.keras_fit import patches
from tfdist.keras_fit.step_labels import ReduceOps, reduce_ops
from tfdist.layers.sync_batch_norm import SyncBatchNormalization

layers, ops = keras.layers, keras.ops
Make = Callable[[], list[keras.layers.Layer]]


def masked(y: Any, x: Any) -> Any:
    known = ops.cast(y > -99, x.dtype)
    return ops.sum(known * ops.square(y - x)) / ops.sum(known)


def of_pairs(y: Any, x: Any) -> Any:
    return ops.mean(ops.square(ops.matmul(x, ops.transpose(x))))


def of_gathered_pairs(y: Any, x: Any) -> Any:
    return ops.mean(ops.square(ops.matmul(x, ops.transpose(tfdist.gather_rows(x)))))


def joined(y: Any, x: Any) -> Any:
    return ops.sum(ops.square(y - x)) / ops.cast(ops.shape(x)[0], x.dtype)


MEANS: dict[str, tuple[Any, Make]] = {
    "batch normalization": ("mse", lambda: [layers.Dense(3), layers.BatchNormalization()]),
    "synchronized": ("mse", lambda: [layers.Dense(3), SyncBatchNormalization()]),
    "spectral normalization": ("mse", lambda: [layers.SpectralNormalization(layers.Dense(3))]),
    "upsampled": (
        "mse",
        lambda: [layers.Reshape((2, 2, 1)), layers.UpSampling2D(), layers.Conv2D(2, 2), layers.Flatten()],
    ),
    "masked softmax": ("mse", lambda: [layers.Lambda(lambda x: ops.softmax(ops.where(x > 0, x, -np.inf)))]),
    "sum divided by rows": (joined, lambda: []),
    "gathered rows": (of_gathered_pairs, lambda: []),
}
OF_ALL_ROWS: dict[str, tuple[Any, Make, str]] = {
    "softmax over rows": ("mse", lambda: [layers.Dense(3), layers.Softmax(axis=0)], "Softmax"),
    "normalized over rows": ("mse", lambda: [layers.Dense(3), layers.UnitNormalization(axis=0)], "Rsqrt"),
    "mean over a mask": (masked, lambda: [layers.BatchNormalization()], "RealDiv"),
    "pairs": (of_pairs, lambda: [], "MatMul"),
}


def labelled(loss: Any, make: Make) -> ReduceOps:
    patches.install()
    model = keras.Sequential([keras.Input((4,)), *make(), layers.Dense(2)])
    model.compile("sgd", loss, metrics=["mae"])
    model.evaluate(np.ones((2, 4)), np.ones((2, 2)), verbose=0)  # builds the loss
    spec = tf.TensorSpec([8, 4], keras.config.floatx()), tf.TensorSpec([8, 2], keras.config.floatx())
    return reduce_ops(model, model.train_step, spec, None)


@pytest.mark.parametrize("name", MEANS)
def test_means(name: str) -> None:
    found = labelled(*MEANS[name])
    assert (found.needs_all_rows, found.gradients) == ("", ["mean"])


@pytest.mark.parametrize("name", OF_ALL_ROWS)
def test_what_needs_all_rows_is_named_by_its_operation(name: str) -> None:
    loss, make, operation = OF_ALL_ROWS[name]
    last = "" if loss == "mse" else max(line for *_, line in loss.__code__.co_lines() if line)
    found = labelled(loss, make).needs_all_rows
    assert f"computed from all rows together, by {operation} in tests/keras_fit/labels_of_keras_test.py:{last}" in found


@pytest.mark.parametrize("use", quick(["fit", "evaluate", "predict"], "fit"))
def test_strict_rows_refuse_it(use: str, mirrored2: tfdist.Strategy) -> None:
    with mirrored2.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Softmax(axis=0)])
        model.compile("sgd", "mse")
    tfdist.distribute(model, mirrored2, rows="strict")
    given = (np.ones((8, 4)),) if use == "predict" else (np.ones((8, 4)), np.ones((8, 2)))
    with pytest.raises(InputError, match="--rows=strict.* Received: .* needs all rows of a batch: .* by Softmax"):
        getattr(model, use)(*given, verbose=0)
