"""Random layers as a pure function of (seed, step, replica)."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.step import randomness


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


def test_states_are_those_of_the_random_layers(model):
    states = randomness.seed_states(model)
    assert [state.shape for state in states] == [(2,), (2,)]
    assert [id(state) for state in states] == [id(layer.seed_generator.state) for layer in model.layers[:2]]


def test_masks(mirrored2, model):
    first, second = masks(mirrored2, model, 1, 5)
    assert set(np.unique(first)) == {0.0, 2.0}
    assert np.any(first != second), "replicas differ"
    np.testing.assert_array_equal(masks(mirrored2, model, 1, 5), [first, second])
    for seed, step in ((1, 6), (2, 5)):
        assert all(np.any(a != b) for a, b in zip(masks(mirrored2, model, seed, step), [first, second], strict=True))


def test_layers_and_replicas_and_steps_have_states_of_their_own(mirrored2, model):
    states = randomness.seed_states(model)
    seen = set()

    def replica_function(number):
        randomness.reseed(states, 3, number, mirrored2.collectives.rank)
        return [tf.identity(state.value) for state in states]

    for step in range(20):
        for state in mirrored2.run(replica_function, tf.constant(step, tf.int64)):
            seen |= {tuple(value.numpy().tolist()) for value in mirrored2.local(state)}
    assert len(seen) == 20 * 2 * 2
    assert min(min(state) for state in seen) >= 0


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
