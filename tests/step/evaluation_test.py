"""Evaluation gives the results of one device, for any number of examples and replicas."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.errors import InputError
from tfdist.step import loss

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((13, 3)).astype("float32")
Y = RANDOM.integers(0, 2, (13, 1)).astype("float32")
WEIGHTS = RANDOM.uniform(0, 2, 13).astype("float32")


def make_model():
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")
    layers = [hidden, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, activation="sigmoid")])


def options():
    return {
        "loss": "binary_crossentropy",
        "metrics": [keras.metrics.AUC(name="auc", num_thresholds=20), "binary_accuracy", "mae"],
        "weighted_metrics": [keras.metrics.Precision(name="precision")],
    }


FEW = {"loss": "mse", "metrics": ["mae"]}


def make_trainer(strategy, **given):
    with strategy.scope():
        return tfdist.Trainer(make_model(), optimizer="sgd", **(given or options()))


def by_keras(*data, **given):
    model = make_model()
    model.compile("sgd", **(given or options()))
    x, y, *weight = data
    # In one batch, because Keras weights batches of different sizes unevenly if there are sample weights.
    return model.evaluate(x, y, sample_weight=weight[0] if weight else None, batch_size=13, return_dict=True, verbose=0)


def test_sizes_that_neither_batch_nor_replicas_divide(mirrored4):
    trainer = make_trainer(mirrored4)
    for size in (13, 1):
        results = trainer.evaluate((X[:size], Y[:size]), batch_size=8)
        assert results == pytest.approx(by_keras(X[:size], Y[:size]), rel=1e-5)


@pytest.mark.parametrize(("strategy", "batch_size"), [("single", 5), ("mirrored2", 100)])
def test_the_batch_size_does_not_matter(strategy, batch_size, request):
    trainer = make_trainer(request.getfixturevalue(strategy), **FEW)
    assert trainer.evaluate((X, Y), batch_size=batch_size) == pytest.approx(by_keras(X, Y, **FEW), rel=1e-5)


def test_sample_weights(mirrored2):
    results = make_trainer(mirrored2).evaluate((X, Y, WEIGHTS), batch_size=5)
    assert results == pytest.approx(by_keras(X, Y, WEIGHTS), rel=1e-5)


@pytest.mark.parametrize(
    ("size", "batch_size", "message"),
    [
        (
            13,
            8,
            "the number of examples to evaluate must be divisible .* 13 examples and 2 replicas. Drop the remaining",
        ),
        (12, 5, "^batch_size must be divisible .* Received: batch_size=5 and 2 replicas. Use 4 or 6."),
    ],
)
def test_a_strategy_that_compiles_replicas_refuses_what_it_cannot_share(
    mirrored2, monkeypatch, size, batch_size, message
):
    monkeypatch.setattr(mirrored2, "compiles_replicas", True)  # as on a TPU
    trainer = make_trainer(mirrored2, **FEW)
    with pytest.raises(InputError, match=message):
        trainer.evaluate((X[:size], Y[:size]), batch_size=batch_size)
    assert trainer.evaluate((X[:12], Y[:12]), batch_size=8) == pytest.approx(by_keras(X[:12], Y[:12], **FEW), rel=1e-5)


def test_a_second_evaluation_does_not_trace_again(mirrored2, monkeypatch):
    traces = []
    terms = loss.terms

    def counted(*args, **named):
        traces.append(1)
        return terms(*args, **named)

    monkeypatch.setattr(loss, "terms", counted)
    trainer = make_trainer(mirrored2, **FEW)
    first = trainer.evaluate((X, Y), batch_size=8)
    count = len(traces)
    assert count
    assert trainer.evaluate((X, Y), batch_size=8) == first
    trainer.fit((X, Y), batch_size=8, steps=1)
    in_training = len(traces)
    changed = trainer.evaluate((X, Y), batch_size=8)
    assert changed["loss"] != first["loss"]
    assert len(traces) == in_training


def test_statistics_are_those_of_all_replicas(mirrored2):
    """Local BatchNorm's moving statistics differ between replicas during training; evaluation uses their mean."""
    trainer = make_trainer(mirrored2, **FEW)
    trainer.fit((X, Y), batch_size=8, steps=3)
    evaluated = trainer.evaluate((X, Y), batch_size=8)
    copy = make_model()
    copy.compile("sgd", **FEW)
    for variable, source in zip(copy.variables, trainer.model.variables, strict=True):
        both = [np.asarray(value) for value in mirrored2.local(source.value)]
        if "moving" in source.path:
            np.testing.assert_array_equal(both[0], both[1])
        variable.assign(both[0])
    assert evaluated == pytest.approx(copy.evaluate(X, Y, batch_size=13, return_dict=True, verbose=0), rel=1e-5)
