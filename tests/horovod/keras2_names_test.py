"""`opt.variables()` and `opt.lr`, which Keras 3 has removed, with the drop-in import."""

import subprocess
import sys
import warnings

import keras
import pytest
import tensorflow as tf

import tfdist.horovod as hvd
from tfdist.horovod import module_aliases

OPTIMIZERS = {
    "plain": lambda: keras.optimizers.Adam(0.5),
    "of tf.optimizers": lambda: tf.optimizers.SGD(0.5, momentum=0.9),
    "distributed": lambda: hvd.DistributedOptimizer(keras.optimizers.Adam(0.5)),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
    "scaled and distributed": lambda: hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:optimizer.:FutureWarning")
def test_older_names_are_the_new_ones(name):
    optimizer = OPTIMIZERS[name]()
    optimizer.build([keras.Variable([1.0])])
    assert [v.path for v in optimizer.variables()] == [v.path for v in optimizer.variables]
    assert len(optimizer.variables()) > 1
    assert float(optimizer.lr) == 0.5
    optimizer.lr = 0.25
    assert float(optimizer.learning_rate) == 0.25
    tf.keras.backend.set_value(optimizer.lr, 0.125)  # as in the elastic example after a reset
    optimizer.lr.assign(optimizer.lr * 2)
    assert float(optimizer.learning_rate) == 0.25


def test_a_schedule_is_what_lr_is_too(monkeypatch):
    monkeypatch.setattr(module_aliases, "_warn_once", lambda *names: None)
    assert float(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)).lr) == 0.5


def test_each_older_name_warns_once_and_names_the_new_form():
    module_aliases._warn_once.cache_clear()
    optimizer = keras.optimizers.SGD(0.5)
    with warnings.catch_warnings(record=True, action="always") as said:
        for _ in range(2):
            _ = optimizer.variables(), optimizer.lr
    assert [one.category for one in said] == [FutureWarning] * 2
    assert [str(one.message).partition(" instead")[0] for one in said] == [
        "optimizer.variables() works only under tfdist.horovod. Use Keras 3's optimizer.variables",
        "optimizer.lr works only under tfdist.horovod. Use Keras 3's optimizer.learning_rate",
    ]
    assert {one.filename for one in said} == {__file__}


def test_broadcasting_the_variables_of_an_optimizer_does_not_warn(monkeypatch):
    """This package uses a callable list as a list, without calling it."""
    module_aliases._warn_once.cache_clear()
    monkeypatch.setattr(hvd.object_exchange, "broadcast", lambda value, *_, **options: value)
    with warnings.catch_warnings(action="error"):
        assert hvd.broadcast_variables(keras.optimizers.SGD(0.5).variables, 0) is None


def test_without_the_drop_in_import_keras_is_as_it_was():
    code = "import keras, tfdist; o = keras.optimizers.SGD(); print(hasattr(o, 'lr'), callable(o.variables))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["False", "False"]
