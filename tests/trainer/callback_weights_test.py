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
        message = rf"With {averages}, averages of weights are evaluated.* Received: {received}. Use {remedy}\(best="
        with pytest.raises(InputError, match=message):
            fit(strategy, callback, **options)


@pytest.mark.parametrize("sync", ["local_sgd(period=3)", "easgd(period=2)"])
def test_callbacks_that_would_save_the_weights_of_one_replica(sync, mirrored2, tmp_path):
    """They are neither evaluated nor enough to continue from."""
    for callback, remedy in (
        (best(tmp_path), r"ModelCheckpoint. Use Checkpoints\(every=\.\.\.\), and trainer.save\(\)"),
        (
            keras.callbacks.BackupAndRestore(tmp_path),
            r"BackupAndRestore. Use Checkpoints\(every=.*\) with trainer.resume\(\)",
        ),
    ):
        with pytest.raises(
            InputError, match=rf"With sync={sync.split('(')[0]}\(.*, averages of weights .* Received: {remedy}"
        ):
            fit(mirrored2, callback, sync=sync)


def test_a_callback_that_swaps_the_average(single):
    message = "already use the moving average of the weights.* Received: SwapEMAWeights. Remove"
    with pytest.raises(InputError, match=message):
        fit(single, keras.callbacks.SwapEMAWeights(), ema=0.9)
    trainer = fit(single, keras.callbacks.Callback(), ema=0.9)
    with pytest.raises(InputError, match=message):
        trainer.evaluate(X, Y, callbacks=keras.callbacks.SwapEMAWeights(), verbose=0)


def test_what_keeps_the_evaluated_weights_is_allowed(single, mirrored2, tmp_path):
    fit(single, keras.callbacks.EarlyStopping(), ema=0.9)
    fit(single, best(tmp_path), ema=0.9)
    fit(mirrored2, best(tmp_path), sync="fedavg(clients=4)")
    fit(single, keras.callbacks.EarlyStopping(**RESTORES), sync="local_sgd(period=2)")
    fit(mirrored2, best(tmp_path, save_best_only=True))


class Assigns(keras.callbacks.Callback):
    """Assigns ones to all weights in one method."""

    def __init__(self, method):
        """Args: method: name of the method."""
        super().__init__()
        setattr(
            self, method, lambda *_, **__: self.model.set_weights([np.ones_like(w) for w in self.model.get_weights()])
        )


@pytest.mark.parametrize(
    ("sync", "method"),
    [
        ("easgd(period=2)", "on_train_begin"),
        ("diloco(period=2)", "on_train_begin"),
        ("diloco(period=2, fragments=2, overlap=True)", "on_train_begin"),
        ("fedavg(clients=4, fraction=1.0)", "on_train_begin"),
        ("fedavg(clients=4, fraction=1.0)", "on_epoch_begin"),
    ],
)
def test_weights_that_a_callback_assigns_are_those_that_training_continues_from(sync, method, mirrored2):
    with mirrored2.scope():
        rate_0 = keras.optimizers.SGD(0.0)
    trainer = fit(mirrored2, Assigns(method), rate_0, sync=sync)
    with trainer.averaged_weights():
        for weight in trainer.model.get_weights():
            np.testing.assert_allclose(weight, 1, rtol=1e-6)
