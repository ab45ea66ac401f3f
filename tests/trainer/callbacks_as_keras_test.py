"""Callbacks of a `Trainer` are told, and add to the history, what they are and do in Keras's own `fit`."""

import keras
import numpy as np
import pytest

import tfdist

RANDOM = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("float64")
X, Y = RANDOM.standard_normal((40, 4)), RANDOM.standard_normal((40, 1))
FIT = {"x": X, "y": Y, "batch_size": 10, "epochs": 2, "shuffle": False, "validation_data": (X, Y), "verbose": 0}
COMPILED = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}


def build():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def by_keras(callbacks, make=build, **given):
    keras.utils.clear_session(free_memory=False)
    model = make()
    model.compile(**COMPILED)
    return model.fit(**FIT | given, callbacks=callbacks)


def by_trainer(strategy, callbacks, make=build, **given):
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        trainer = tfdist.Trainer(make(), **COMPILED)
    return trainer.fit(**FIT | given, callbacks=callbacks)


class AddsToLogs(keras.callbacks.Callback):
    """Adds a number and a text to the logs of an epoch, and corrects a result."""

    def on_epoch_end(self, epoch, logs=None):
        logs |= {"half": epoch / 2, "note": f"epoch {epoch}", "mae": -1.0}


ADD = {
    "own": AddsToLogs,
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=10),
}


@pytest.mark.parametrize("name", ["single", "mirrored2"])
@pytest.mark.parametrize("adds", ADD)
def test_the_history_has_what_callbacks_add_to_the_logs(name, adds, request):
    expected = by_keras([ADD[adds]()])
    found = by_trainer(request.getfixturevalue(name), [ADD[adds]()])
    assert list(found.history) == list(expected.history)
    for key, values in expected.history.items():
        assert found.history[key] == (values if key == "note" else pytest.approx(values)), key
    assert "0.5" in repr(found) or adds != "own"
