"""Steps as functions: random layers draw by (seed, step, replica), and what is not applied leaves every variable as it was."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.gradients import LossScale
from tfdist.step import randomness

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((48, 4)).astype("float32"), RANDOM.standard_normal((48, 2)).astype("float32")


class Counts(keras.layers.Layer):
    """Counts its calls, and notes whether the count is even; the call after this many others has an infinite result."""

    def __init__(self, infinite=1000):
        super().__init__()
        self.infinite = infinite

    def build(self, shape):
        def state(dtype):
            first = "only_first_replica"
            return self.add_weight(shape=(), dtype=dtype, initializer="zeros", trainable=False, aggregation=first)

        self.calls, self.is_even = state("int32"), state("bool")

    def call(self, inputs):
        before = self.calls + 0
        self.calls.assign(before + 1)
        self.is_even.assign(before % 2 == 1)
        scale = keras.ops.where(before == self.infinite, np.inf, 1.0)
        return inputs * keras.ops.cast(scale, inputs.dtype)


def trainer_of(strategy, *layers, **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers])
        return tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", **options)


def values(trainer):
    return [np.array(variable) for variable in (*trainer.model.variables, *trainer.model.optimizer.variables)]


def copies(trainer, variable):
    return [np.array(copy).item() for copy in trainer.strategy.local(variable.value)]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("single", {}), ("single", {"accumulate_steps": 2}), ("single", {"jit_compile": True}), ("mirrored2", {})],
    ids=str,
)
def test_probe_steps_change_no_variable(strategy, options, request):
    """Counters, flags and a weight that the forward pass assigns are equal bit for bit, with probe steps and without."""
    strategy = request.getfixturevalue(strategy)
    runs = []
    for every in (0, 3):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        normalized = keras.layers.SpectralNormalization(keras.layers.Dense(2), power_iterations=2)
        counts = Counts()
        trainer = trainer_of(strategy, counts, keras.layers.Dense(3), normalized, compression="bf16", **options)
        every_so_often = dict.fromkeys(("measure_every", "compression_check_every", "check_sync_every"), every)
        checks = tfdist.Checks(**every_so_often)
        trainer.fit(X, Y, batch_size=8, steps=7, verbose=0, checks=checks)
        runs.append([*values(trainer), *copies(trainer, counts.calls), *copies(trainer, counts.is_even)])
    assert counts.calls.numpy() == 7
    for alone, tried in zip(*runs, strict=True):
        np.testing.assert_array_equal(alone, tried)


@pytest.mark.parametrize(
    ("strategy", "sync"),
    [("single", "every_step"), ("mirrored2", "every_step"), ("mirrored2", "local_sgd(period=2)")],
)
def test_a_skipped_step_changes_no_variable(strategy, sync, request):
    """The call that overflows is made again in each step that follows, as the count does not advance."""
    strategy = request.getfixturevalue(strategy)
    counts = Counts(infinite=3)
    trainer = trainer_of(strategy, counts, keras.layers.Dense(2), sync=sync, loss_scale=LossScale(initial=8.0))
    trainer.fit(X, Y, batch_size=8, steps=6, verbose=0)
    assert copies(trainer, counts.calls) == [3] * strategy.replicas
    assert copies(trainer, counts.is_even) == [False] * strategy.replicas


def test_an_idle_replica_of_a_round_counts_nothing(mirrored2):
    """There is one client: the second replica never has a batch, and gets what the first one has counted."""
    counts = Counts()
    sync = "fedavg(clients=1, fraction=1.0, local_epochs=1)"
    trainer = trainer_of(mirrored2, counts, keras.layers.Dense(2), sync=sync)
    trainer.fit(X, Y, batch_size=8, steps=2, verbose=0)
    assert copies(trainer, counts.calls) == [2 * len(X) // 8] * 2


@pytest.fixture
def model(mirrored2):
    with mirrored2.scope():
        layers = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((64,)), *layers])


def masks(strategy, model, seed, step):
    """Returns the first layer's output for ones, on each replica."""
    states = randomness.seed_states(model)

    def replica_function(number):
        randomness.reseed(states, seed, number, strategy.collectives.rank)
        return model.layers[0](tf.ones([1, 64]), training=True)

    run = tf.function(lambda number: strategy.local(strategy.run(replica_function, number)))
    return [np.asarray(mask) for mask in run(tf.constant(step, tf.int64))]


def test_masks(mirrored2, model):
    first, second = masks(mirrored2, model, 1, 5)
    assert set(np.unique(first)) == {0.0, 2.0}
    assert np.any(first != second), "replicas differ"
    np.testing.assert_array_equal(masks(mirrored2, model, 1, 5), [first, second])
    for seed, step in ((1, 6), (2, 5)):
        assert all(np.any(a != b) for a, b in zip(masks(mirrored2, model, seed, step), [first, second], strict=True))


@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**40 + 7, -1])
def test_any_seed_will_do(single, seed):
    state = keras.random.SeedGenerator(0).state
    randomness.reseed([state], seed, tf.constant(2**33, tf.int64), 0)
    assert np.all(np.asarray(state) >= 0)


def test_later_draws_of_a_replica_are_not_those_of_the_next_one():
    """Keras's generators add 1 to their state with each draw, as with micro-steps."""
    generator = keras.random.SeedGenerator(0)
    drawn = []
    for replica in range(3):
        randomness.reseed([generator.state], 7, tf.constant(5, tf.int64), replica)
        drawn += [tuple(keras.random.uniform([4], seed=generator).numpy()) for _ in range(4)]
    assert len(set(drawn)) == 12
