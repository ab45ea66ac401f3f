"""Linear regression on three replicas of uneven rows, in float64, and the same in NumPy."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import keras_internals

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(40, 5)), RANDOM.normal(size=(40, 2))
RATE, BATCH, REPLICAS = 0.1, 10, 3  # rows: 4, 3, 3
ROWS = np.array([4, 3, 3])


class Seen(tfdist.reporting.NullLedger):
    """Keeps the indices of the examples of each step."""

    def __init__(self):
        self.steps = []

    def write(self, step, count, numbers):
        """Splits them by step."""
        self.steps.extend(np.split(numbers, count))


class Regression:
    """A trainer, and the batches that it has seen."""

    def __init__(self, strategy, sync, optimizer=None, **options):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        self.strategy, self.seen = strategy, Seen()
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
            self.trainer = tfdist.Trainer(
                model,
                optimizer=optimizer() if optimizer else keras.optimizers.SGD(RATE),
                loss="mse",
                sync=sync,
                **options,
            )
        self.trainer.build((X, Y))
        self.start = np.vstack([np.asarray(w) for w in self.trainer.model.get_weights()])

    def fit(self, steps, **more):
        reporting = tfdist.Reporting(ledger=self.seen)
        schedule = tfdist.Schedule(log_every=1)
        given = {"batch_size": BATCH, "verbose": 0, "reporting": reporting, "schedule": schedule} | more
        return self.trainer.fit(X, Y, steps=steps, **given)

    def replicas(self):
        """Returns the weights of each replica: kernel above bias."""
        variables = [keras_internals.value_of(v) for v in self.trainer.model.trainable_variables]
        copies = [[np.asarray(value) for value in self.strategy.local(variable)] for variable in variables]
        return [np.vstack(of_replica) for of_replica in zip(*copies, strict=True)]

    def evaluated(self):
        """Returns the weights that are evaluated."""
        with self.trainer.averaged_weights():
            return self.replicas()[0]

    def gradient(self, step, replica, weights):
        """Returns the gradient of the loss of a replica's rows in a step, for these weights."""
        rows = np.split(self.seen.steps[step], np.cumsum(ROWS)[:-1])[replica]
        x = np.hstack([X[rows], np.ones((len(rows), 1))])
        return 2 / Y[rows].size * x.T @ (x @ weights - Y[rows])


def assert_two_fits_are_one(strategy, sync, first, second):
    one, two = (Regression(strategy, sync) for _ in range(2))
    one.fit(first + second)
    two.fit(first)
    two.fit(second)
    np.testing.assert_array_equal(two.replicas(), one.replicas())
    np.testing.assert_array_equal(two.evaluated(), one.evaluated())


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that is a function of the step; Keras's own round to float32."""

    def __init__(self, function):
        self._table = [function(step) for step in range(30)]

    def __call__(self, step):
        """Looks it up."""
        return keras.ops.take(keras.ops.convert_to_tensor(self._table, "float64"), keras.ops.cast(step, "int32"))


def assert_close(found, wanted, tolerance=1e-9):
    """Compares arrays by the norm of their difference."""
    assert np.linalg.norm(np.asarray(found) - wanted) <= tolerance * np.linalg.norm(wanted)


def three_replicas():
    """Returns the strategy."""
    return tfdist.load_strategy("mirrored", devices=REPLICAS)


def momentum_of(number):
    """Returns a momentum as Keras rounds it, also in float64."""
    return float(tf.constant(number, tf.float32))
