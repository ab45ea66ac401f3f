"""Keras's callbacks that keep or change weights: refused where evaluations have other weights."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.errors import InputError

X, Y = np.ones([8, 3], "float32"), np.ones([8, 1], "float32")
RESTORES = {"restore_best_weights": True}
STOPS, SAVES = r"EarlyStopping\(restore_best_weights=True\)", r"ModelCheckpoint\(save_best_only=True\)"


def fit(strategy, callback, optimizer="sgd", **options):
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer=optimizer, loss="mse", **options)
    trainer.fit(X, Y, batch_size=4, validation_data=(X, Y), callbacks=[callback], verbose=0)
    return trainer


def best(directory, **given):
    return keras.callbacks.ModelCheckpoint(directory / "best.keras", **given)


@pytest.mark.parametrize(
    ("name", "options", "averages"),
    [
        ("single", {"ema": 0.9}, "ema"),
        ("mirrored2", {"sync": "local_sgd(period=3)"}, r"sync=local_sgd\(period=3\)"),
        ("mirrored2", {"sync": "local_sgd(period=3)", "ema": 0.9}, r"ema and sync=local_sgd\(.*\)"),
    ],
)
def test_callbacks_that_keep_the_best_weights(name, options, averages, request, tmp_path):
    strategy = request.getfixturevalue(name)
    for callback, received, remedy in (
        (
            keras.callbacks.EarlyStopping(**RESTORES),
            STOPS,
            r"tfdist.EarlyStopping, and for the best weights Checkpoints",
        ),
        (best(tmp_path, save_best_only=True), SAVES, "Checkpoints"),
    ):
        message = rf"evaluated with {averages}, which are averages. Received: {received}. Use {remedy}\(best="
        with pytest.raises(InputError, match=message):
            fit(strategy, callback, **options)


def test_a_callback_that_swaps_the_average(single):
    message = "the moving average of the weights already.* Received: SwapEMAWeights. Leave"
    with pytest.raises(InputError, match=message):
        fit(single, keras.callbacks.SwapEMAWeights(), ema=0.9)
    trainer = fit(single, keras.callbacks.Callback(), ema=0.9)
    with pytest.raises(InputError, match=message):
        trainer.evaluate(X, Y, callbacks=keras.callbacks.SwapEMAWeights(), verbose=0)


def test_what_keeps_the_evaluated_weights_is_allowed(single, mirrored2, tmp_path):
    fit(single, keras.callbacks.EarlyStopping(), ema=0.9)
    fit(single, best(tmp_path), ema=0.9)
    fit(single, keras.callbacks.EarlyStopping(**RESTORES), sync="local_sgd(period=2)")
    fit(mirrored2, best(tmp_path, save_best_only=True))


def test_the_best_checkpoint_has_the_weights_that_were_evaluated(single, tmp_path):
    """What the messages recommend."""
    with single.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.9), loss="mse", ema=0.5)
    saved = tfdist.Checkpoints(directory=str(tmp_path / "run"), best="val_loss")
    trainer.fit(X, Y, batch_size=4, epochs=6, validation_data=(X, Y), checkpoints=saved, verbose=0)
    found = trainer.load_best()
    assert trainer.evaluate(X, Y, batch_size=4, verbose=0)["loss"] == pytest.approx(found.value, rel=1e-6)
