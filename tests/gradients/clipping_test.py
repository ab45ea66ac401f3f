"""Clipping applies to the gradient of the global batch, for any number of replicas."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist import testing
from tfdist.errors import InputError
from tfdist.gradients import Clip

CASE = testing.Case(model="mlp", optimizer="sgd", batch_size=13, steps=5)


@pytest.mark.parametrize(
    ("clip", "strategy"),
    [
        (Clip(norm=0.05), "mirrored4"),
        (Clip(value=0.004), "mirrored2"),
        pytest.param(Clip(norm=0.05), "mirrored2", marks=pytest.mark.full),
        pytest.param(Clip(value=0.004), "mirrored4", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_same_on_any_number_of_replicas(clip, strategy, single, float64, request):
    expected = testing.run_case(single, CASE, clip=clip)
    free = testing.run_case(single, CASE)
    outcome = testing.run_case(request.getfixturevalue(strategy), CASE, clip=clip)
    assert testing.compare(expected.variables, free.variables, "mlp")[0].relative > 1e-3, "the limit was never reached"
    assert testing.compare(outcome.variables, expected.variables, "mlp")[0].relative < 1e-9


@pytest.mark.parametrize(
    ("ours", "keras_own"),
    [(Clip(norm=0.05), {"global_clipnorm": 0.05}), (Clip(value=0.004), {"clipvalue": 0.004})],
    ids=["norm", "value"],
)
def test_an_optimizers_own_clipping_means_the_same(ours, keras_own, mirrored2, float64, monkeypatch, caplog):
    expected = testing.run_case(mirrored2, CASE, clip=ours)
    monkeypatch.setitem(testing.OPTIMIZERS, "sgd", lambda: keras.optimizers.SGD(0.05, momentum=0.9, **keras_own))
    with caplog.at_level("INFO", "tfdist"):
        outcome = testing.run_case(mirrored2, CASE)
    assert testing.compare(outcome.variables, expected.variables, "mlp")[0].relative < 1e-12
    assert "Gradients are clipped after they are summed" in caplog.text
    with pytest.raises(InputError, match="clipped in one place"):
        testing.run_case(mirrored2, CASE, clip=ours)


def test_the_norm_that_is_reported_is_the_one_before_clipping(single):
    data = (np.ones((8, 3), "float32"), np.full((8, 1), 100.0, "float32"))
    with single.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(1.0), loss="mse", clip=Clip(norm=1.0))
    history = trainer.fit(data, batch_size=8, steps=1)
    assert history.last("train")["gradient_norm"] == pytest.approx(200 * 4**0.5)
    assert np.linalg.norm(np.concatenate([w.ravel() for w in model.get_weights()])) == pytest.approx(1.0)
