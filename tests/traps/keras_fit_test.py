"""Defects of Keras's own `fit`: a version that fixes one fails here."""

import pathlib
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import jobs as processes
from tests.step.user_metrics import OneVariable

pytestmark = pytest.mark.processes

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "migration" / "tf_distribute_before.py"


def test_fit_fails_under_multiworker_mirrored() -> None:
    """Guards: `model.fit` under MultiWorkerMirroredStrategy with 2 workers does not train: it cannot read a PerReplica.

    What depends on it: tfdist/keras_fit/ replaces what Keras's `fit` does with a strategy.
    """
    with processes.job([sys.executable, str(PROGRAM), "1"], 2) as job:
        outputs = [end.output for end in job.wait(300)]
    for output in outputs:
        assert '"loss"' not in output, "fit works now"
    assert any("PerReplica" in output for output in outputs), outputs


def _table_after_a_step(optimizer: keras.Optimizer, dense: bool) -> np.ndarray:
    """Returns an embedding after one step with a batch in which a row occurs twice."""
    table = keras.Variable(np.ones((3, 2)), dtype="float64")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table.value, [0, 0, 1]) * tf.constant([[1.0], [2.0], [3.0]], tf.float64))
    gradient: Any = tape.gradient(loss, table.value)
    optimizer.apply([tf.convert_to_tensor(gradient) if dense else gradient], [table])
    return np.asarray(table)


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_keras_squares_the_gradients_of_a_row_before_it_adds_them_up(name: str, float64: None) -> None:
    """Guards: for `tf.IndexedSlices` in which a row occurs twice, Adam and RMSprop differ from the dense gradient.

    What depends on it: docs/guides/keras_fit.md explains why an embedding trained by plain Keras differs from ours.
    """
    make = getattr(keras.optimizers, name)
    sparse, dense = (_table_after_a_step(make(0.1), is_dense) for is_dense in (False, True))
    assert np.abs(sparse - dense)[0].max() > 1e-3
    np.testing.assert_allclose(sparse[1:], dense[1:], rtol=1e-12)  # rows that occur once


def test_keras_counts_an_update_for_the_batch_that_does_not_come() -> None:
    """Guards: for data of unknown length, `iterations` is increased once more than there are batches.

    What depends on it: docs/guides/keras_fit.md explains why schedules and Adam then differ from ours, which counts the
    updates.
    """
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    rows = tf.data.Dataset.from_tensor_slices((np.ones((8, 1)), np.ones((8, 1)))).filter(lambda x, y: x[0] > 0)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(rows.batch(4), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 3


def test_keras_runs_more_steps_than_it_is_given(mirrored2: tfdist.Strategy) -> None:
    """Guards: `steps_per_epoch` is rounded up to a multiple of `steps_per_execution`.

    What depends on it: docs/guides/keras_fit.md says so, as tfdist runs the given number.
    """
    rows = np.ones((24, 1))
    for strategy, steps in ((None, 6), (mirrored2, 5)):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3)
        if strategy is not None:
            tfdist.distribute(model, strategy)
        model.fit(rows, rows, batch_size=4, steps_per_epoch=5, verbose=0)
        assert int(model.optimizer.iterations) == steps


class Rows(OneVariable):
    """Counts the rows of a pass; its result is the variable itself, as in Keras's guide to training."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], self.value.dtype))

    def result(self) -> Any:
        return self.value.value


def test_keras_logs_validation_s_value_for_training_where_a_metric_returns_its_variable() -> None:
    """Guards: for a metric whose `result` is its variable, `history` has the validation value for training, too.

    What depends on it: docs/guides/keras_fit.md explains why such a metric differs from ours, which has the training value.
    """
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Rows()])
    history = model.fit(np.ones((8, 1)), np.ones((8, 1)), validation_split=0.25, verbose=0).history
    assert [float(history[name][0]) for name in ("rows", "val_rows")] == [2.0, 2.0]
