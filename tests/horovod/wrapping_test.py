"""Wrapped optimizers and callbacks in one process, without an engine: what is preserved, and what is refused."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist.horovod as hvd
from tfdist.errors import InputError
from tfdist.horovod.operations import adasum
from tfdist.horovod.wrapped_optimizer import Accumulation


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that cannot be serialized."""

    def __call__(self, step):
        return 0.1


def decayed(optimizer: keras.Optimizer) -> list[float]:
    """Returns a kernel and a bias that were 1, after an update with zero gradients."""
    variables = [keras.Variable(np.ones(1), name=name) for name in ("kernel", "bias")]
    optimizer.build(variables)
    getattr(optimizer, "inner_optimizer", optimizer)._apply_weight_decay(variables)
    return [float(variable.numpy()[0]) for variable in variables]


@pytest.mark.parametrize("wrap", [lambda one: one, keras.optimizers.LossScaleOptimizer], ids=["plain", "scaled"])
@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy], ids=["wrapped", "copied"])
def test_variables_that_are_excluded_from_weight_decay_stay_so(wrap, copied):
    inner = keras.optimizers.AdamW(0.5, weight_decay=0.5)
    inner.exclude_from_weight_decay(var_names=["bias"])
    assert decayed(copied(hvd.DistributedOptimizer(wrap(inner)))) == [0.75, 1.0]


def test_the_count_of_updates_of_an_optimizer_that_is_not_built_stays():
    optimizer = keras.optimizers.Adam()
    optimizer.iterations.assign(7)
    assert int(hvd.DistributedOptimizer(optimizer).iterations) == 7


def test_a_schedule_that_cannot_be_saved_is_an_error_of_one_line():
    with pytest.raises(InputError, match="An optimizer is wrapped through its get_config") as error:
        hvd.DistributedOptimizer(keras.optimizers.SGD(Halving()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spoil", [pickle.dumps, copy.copy], ids=["pickle", "copy"])
@pytest.mark.parametrize("wrap", [lambda one: one, keras.optimizers.LossScaleOptimizer], ids=["plain", "scaled"])
def test_what_would_come_back_as_a_plain_optimizer_is_an_error(spoil, wrap):
    with pytest.raises(InputError, match="A distributed optimizer cannot be pickled. Received: "):
        spoil(wrap(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))))


def test_a_model_is_compiled_with_a_keyword_of_older_scripts(tmp_path):
    """The class's `compile` stays Keras's own, which is required for saving the model."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", experimental_run_tf_function=False)
    model.save(tmp_path / "model.keras")
    assert isinstance(keras.models.load_model(tmp_path / "model.keras").optimizer, keras.optimizers.SGD)
    with pytest.raises(TypeError, match="another"):
        model.compile(optimizer, another=False)


def test_passes_that_are_integers_of_numpy_are_those_of_python():
    assert type(Accumulation(np.int64(3), average=True).passes) is int


@pytest.mark.parametrize("passes", [True, 0, 1.5])
def test_other_numbers_of_passes_are_refused(passes):
    with pytest.raises(InputError, match=f"backward_passes_per_step must be an integer .* Received: {passes}"):
        Accumulation(passes, average=True)


def test_logs_that_are_vectors_are_averaged(monkeypatch):
    """Simulates a second rank with three times the values of this one."""
    monkeypatch.setattr("tfdist.horovod.callbacks.allreduce", lambda x, op: tf.constant(2.0, x.dtype) * x)
    logs = {"loss": 1.5, "recall": np.array([[0.25, 0.5]], "float32"), "count": np.float32(2)}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert (logs["loss"], logs["count"]) == (3.0, 4.0)
    assert isinstance(logs["loss"], float)
    np.testing.assert_array_equal(logs["recall"], [[0.5, 1.0]])


def test_adasum_of_vectors_with_nothing_in_common_is_their_sum():
    """As a tree; operations_test.py has two ranks, and what is refused."""
    np.testing.assert_array_equal(adasum([tf.constant(row) for row in np.eye(4)], "x"), np.ones(4))
