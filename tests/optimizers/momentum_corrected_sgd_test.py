"""Rescaling with the learning rate: the velocity, as if the rate had never been different, and single updates."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.comparisons import largest_difference, rates
from tfdist import keras_internals
from tfdist.optimizers import MomentumCorrectedSGD, WarmupAndDecay

WARMUP = WarmupAndDecay(1.0, warmup_steps=6, warmup_start=0.1, decay="step(every=8, factor=0.1)")
FROM_ZERO = WarmupAndDecay(0.5, warmup_steps=3)
MOMENTUM = 0.9


def reference(starts, gradients, rates):
    """Equation 9 of Goyal et al.: u = m u + g; w = w - rate u."""
    w = {path: value.copy() for path, value in starts.items()}
    u = {path: np.zeros_like(value) for path, value in starts.items()}
    for rate, step in zip(rates, gradients, strict=True):
        for path, g in step.items():
            u[path] = MOMENTUM * u[path] + g
            w[path] = w[path] - rate * u[path]
    return w


@pytest.mark.parametrize(("strategy", "schedule"), [("single", WARMUP), ("mirrored2", WARMUP), ("single", FROM_ZERO)])
def test_equals_the_paper(strategy, schedule, starts, gradients, train, float64, request):
    found = train(request.getfixturevalue(strategy), lambda: MomentumCorrectedSGD(schedule, momentum=MOMENTUM))
    of_steps = rates(schedule, range(len(gradients)))
    assert len(set(of_steps)) > (6 if schedule is WARMUP else 3) and (of_steps[0] == 0) == (schedule is FROM_ZERO)
    assert largest_difference(found, reference(starts, gradients, of_steps)) < 1e-12


def test_keras_s_own_differs_where_the_rate_changes(starts, gradients, train, single, float64):
    found = train(single, lambda: keras.optimizers.SGD(WARMUP, momentum=MOMENTUM))
    of_steps = rates(WARMUP, range(len(gradients)))
    assert largest_difference(found, reference(starts, gradients, of_steps)) > 0.1


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {}], ids=str)
def test_a_constant_rate_is_keras_s(options, train, single, float64):
    found = train(single, lambda: MomentumCorrectedSGD(0.1, weight_decay=0.01, **options))
    expected = train(single, lambda: keras.optimizers.SGD(0.1, weight_decay=0.01, **options))
    assert largest_difference(found, expected) < 1e-5  # Keras rounds its momentum to float32


def test_is_loaded_by_its_configuration():
    optimizer = MomentumCorrectedSGD(WARMUP, momentum=0.8, nesterov=True)
    loaded = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(loaded) is MomentumCorrectedSGD
    assert loaded.get_config() == optimizer.get_config()


@pytest.mark.parametrize(
    "rate", [0.5, keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)], ids=["one", "several"]
)
def test_updates_with_a_part_of_the_rate(rate):
    """By a private API of Keras; also for weight decay, which reads the learning rate separately."""
    optimizer = keras.optimizers.SGD(rate, weight_decay=0.1)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    wanted = 1.0
    for factor, now in ((0.5, 0.5), (1, 0.25 if callable(rate) else 0.5)):
        with keras_internals.scale_learning_rate(optimizer, factor):
            optimizer.apply([tf.constant([1.0])])
        wanted -= factor * now * (1 + 0.1 * wanted)
        np.testing.assert_allclose(variable.numpy(), [wanted], rtol=1e-6)
        assert "_get_current_learning_rate" not in vars(optimizer)
