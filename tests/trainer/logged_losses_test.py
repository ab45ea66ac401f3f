"""What a `Trainer` logs of losses that are not means over rows is what Keras logs, and it trains in the same way."""

import keras
import numpy as np
import pytest

import tfdist

RANDOM = np.random.default_rng(0)
X, Y, WEIGHTS = RANDOM.standard_normal((70, 4)), RANDOM.standard_normal((70, 1)), RANDOM.uniform(size=70)


def build():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=["at once", "micro-steps"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_losses_that_are_not_means_are_logged_as_by_keras(reduction, options, mirrored2, float64):
    """Of a loss without reduction, the sum is differentiated and the mean is logged; a sum is logged per batch."""

    def compiled():
        return {"optimizer": keras.optimizers.SGD(0.01), "loss": keras.losses.MeanSquaredError(reduction=reduction)}

    fit = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, "sample_weight": WEIGHTS}
    fit["validation_data"] = X[:33], Y[:33]
    plain = build()
    plain.compile(**compiled())
    expected = plain.fit(X, Y, **fit).history
    keras.utils.clear_session(free_memory=False)
    with mirrored2.scope():
        trainer = tfdist.Trainer(build(), **compiled(), **options)
    found = trainer.fit(X, Y, **fit).history
    assert {*found} == {*expected}
    for metric, values in expected.items():
        np.testing.assert_allclose(found[metric], values, rtol=1e-12, err_msg=metric)
    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)
    evaluated = plain.evaluate(X, Y, 16, 0, return_dict=True)
    assert trainer.evaluate(X, Y, 16) == pytest.approx(evaluated, rel=1e-12)
