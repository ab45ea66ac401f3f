"""Linear regression on replicas of uneven rows, whose exchanges tests compare with NumPy."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import keras_internals
from tfdist.reporting.ledger_file import NullLedger

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(40, 5)), RANDOM.normal(size=(40, 2))
RATE, BATCH, REPLICAS = 0.1, 10, 3  # rows: 4, 3, 3
ROWS = np.array([4, 3, 3])
NESTEROV = "sgd(momentum=0.9, nesterov=True, learning_rate=0.7)"


def momentum_of(number):
    """Returns a momentum as Keras rounds it, also in float64."""
    return float(tf.constant(number, tf.float32))


def trainer_of(strategy, sync, optimizer=None, layers=(), **options):
    """Returns a trainer; optimizer: itself, or a function that creates it in the scope, as those of layers do."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), *(layer() for layer in layers), keras.layers.Dense(2)])
        optimizer = optimizer() if callable(optimizer) else optimizer or keras.optimizers.SGD(RATE)
        return tfdist.Trainer(model, optimizer=optimizer, loss="mse", sync=sync, **options)


def fit(trainer, steps, batch_size=BATCH, **more):
    """Trains without output; returns the history."""
    return trainer.fit(X, Y, batch_size=batch_size, steps=steps, verbose=0, **more)


def trained(strategy, sync, steps=6, optimizer=None, layers=(), **options):
    """Returns a trainer after some steps, and the history, which has a record for each."""
    trainer = trainer_of(strategy, sync, optimizer, layers, **options)
    return trainer, fit(trainer, steps, schedule=tfdist.Schedule(log_every=1))


def of_replicas(strategy, variable):
    """Returns each replica's value of a variable."""
    return [np.asarray(value) for value in strategy.local(keras_internals.value_of(variable))]


def global_weights(trainer):
    """Returns kernel and bias as they are evaluated."""
    with trainer.averaged_weights():
        return [np.asarray(trainer.strategy.local(v.value)[0]) for v in trainer.model.trainable_variables]


def assert_close(found, wanted, tolerance=1e-9):
    """Compares arrays, or lists of them, by the norms of their differences."""
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True):
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


class Seen(NullLedger):
    """Keeps the indices of the examples of each step."""

    def __init__(self):
        self.steps = []

    def write(self, step, count, numbers):
        """Splits them by step."""
        self.steps.extend(np.split(numbers, count))


class Regression:
    """A trainer, and the batches that it has seen."""

    def __init__(self, strategy, sync, optimizer=None, **options):
        self.strategy, self.seen = strategy, Seen()
        self.trainer = trainer_of(strategy, sync, optimizer, **options)
        self.trainer.build((X, Y))
        self.start = np.vstack([np.asarray(w) for w in self.trainer.model.get_weights()])

    def fit(self, steps, **more):
        given = {"schedule": tfdist.Schedule(log_every=1), **more}
        return fit(self.trainer, steps, reporting=tfdist.Reporting(ledger=self.seen), **given)

    def replicas(self):
        """Returns the weights of each replica: kernel above bias."""
        copies = [of_replicas(self.strategy, variable) for variable in self.trainer.model.trainable_variables]
        return [np.vstack(of_replica) for of_replica in zip(*copies, strict=True)]

    def evaluated(self):
        """Returns the weights that are evaluated."""
        return np.vstack(global_weights(self.trainer))

    def gradient(self, step, replica, weights, rows=ROWS):
        """Returns the gradient of the loss of a replica's rows in a step, for these weights."""
        mine = np.split(self.seen.steps[step], np.cumsum(rows)[:-1])[replica]
        x = np.hstack([X[mine], np.ones((len(mine), 1))])
        return 2 / Y[mine].size * x.T @ (x @ weights - Y[mine])


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that is a function of the step; Keras's own round to float32."""

    def __init__(self, function):
        self._table = [function(step) for step in range(30)]

    def __call__(self, step):
        """Looks it up."""
        return keras.ops.take(keras.ops.convert_to_tensor(self._table, "float64"), keras.ops.cast(step, "int32"))
