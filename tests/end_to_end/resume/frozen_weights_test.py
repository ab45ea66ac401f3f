"""Frozen weights keep their bits on any number of replicas."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.collectives import RecordingCollectives

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((24, 5)).astype("float32"), RANDOM.standard_normal((24, 4)).astype("float32")


@pytest.fixture(scope="module")
def mirrored3():
    return tfdist.load_strategy("mirrored", devices=3, environment={})


def make(strategy, seed=0):
    """Returns a trainer whose frozen layer and trained layers have equal shapes."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        backbone = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5), keras.layers.BatchNormalization()])
        backbone.layers[0].trainable = False
        layers = [keras.layers.Dense(5), backbone, keras.layers.Dense(5), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss="mse")
    trainer.build((X, Y))
    return trainer


def trained(trainer):
    return [np.array(variable).tobytes() for variable in trainer.model.trainable_variables]


def frozen(trainer):
    weights = trainer.model.layers[1].layers[0].variables
    return [[np.array(copy).tobytes() for copy in trainer.strategy.local(v.value)] for v in weights]


def test_they_keep_their_bits_and_are_not_sent(mirrored3, monkeypatch):
    monkeypatch.setattr(mirrored3, "collectives", RecordingCollectives(mirrored3.collectives))
    trainer = make(mirrored3)
    before = frozen(trainer)
    trainer.fit(X, Y, batch_size=6, epochs=2, verbose=0)
    trainer.evaluate(X, Y)
    trainer.predict(X)
    assert frozen(trainer) == before
    calls = [call for call in mirrored3.collectives.calls if "statistics" in call.name]
    assert {call.payload_bytes for call in calls} == {(2 * 5 + 1) * 8}, "mean, variance and their weight, in float64"


@pytest.mark.parametrize("restarts", [True, False], ids=["same names", "other names"])
def test_they_are_restored(restarts, mirrored3, single, tmp_path):
    """With a different number of replicas, and if Keras gives the layers other numbers, too."""
    keras.utils.clear_session(free_memory=False)
    checkpoints = tfdist.Checkpoints(directory=tmp_path, every="3")
    saved = make(mirrored3)
    saved.fit(X, Y, batch_size=6, steps=3, verbose=0, checkpoints=checkpoints)
    there = Checkpoint.open(complete_checkpoints(tmp_path)[0])
    layer = saved.model.layers[1].layers[0]
    values = [there.read(f"model/{weight.path}") for weight in (layer.kernel, layer.bias)]
    assert [value.shape for value in values] == [(5, 5), (5,)]
    expected = [value.tobytes() for value in values]
    for strategy in (mirrored3, single):
        if restarts:
            keras.utils.clear_session(free_memory=False)
        resumed = make(strategy, seed=1)
        assert resumed.resume(tmp_path) == 3
        assert (resumed.model.layers[1].layers[0].path == layer.path) == restarts
        assert frozen(resumed) == [[value] * strategy.replicas for value in expected]
        assert trained(resumed) == trained(saved)
