"""Keras's callbacks resume from a checkpoint of the version that saved every attribute of every callback.

`older_callbacks/` was saved by the program below, without `Average.state_dict`, and stopped in its third epoch.
"""

import pathlib
import shutil

import keras
import numpy as np
import pytest

import tfdist
from tfdist.checkpoint.format import Checkpoint

SAVED = pathlib.Path(__file__).with_name("older_callbacks") / "step-000000013"
RANDOM = np.random.default_rng(0)
DATA = RANDOM.standard_normal((20, 4)).astype("float32"), RANDOM.integers(0, 2, 20)


class Average(keras.callbacks.Callback):
    """Its attributes were saved; it now has a `state_dict` that is unrelated to them."""

    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def callbacks(directory):
    best = directory / "best.weights.h5"
    return [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0, cooldown=2),
        keras.callbacks.EarlyStopping("loss", patience=30, min_delta=0.05, restore_best_weights=True),
        keras.callbacks.History(),
        keras.callbacks.ModelCheckpoint(best, "loss", save_best_only=True, save_weights_only=True, save_freq=3),
        keras.callbacks.TensorBoard(directory / "events", write_graph=False),
        keras.callbacks.CSVLogger(directory / "log.csv"),
        Average(),
    ]


def make(strategy):
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.02), loss=loss, seed=5)
    trainer.build(tfdist.data.ArraySource(DATA))
    return trainer


def test_keras_callbacks_resume(single, tmp_path, caplog):
    shutil.copytree(SAVED, tmp_path / SAVED.name)
    trainer = make(single)
    assert trainer.resume(tmp_path) == 13
    own, found = callbacks(tmp_path), {}

    def look(batch):
        found.setdefault(
            batch, [dict(vars(callback)) for callback in own] + [float(trainer.model.optimizer.learning_rate)]
        )

    look_first = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: look(batch))
    trainer.fit(DATA, batch_size=4, steps=20, schedule=tfdist.Schedule(steps_per_call=1), callbacks=[look_first, *own])
    plateau, stop, history, best, board, _, average, rate = found[13]
    epochs, rates = [1.3179509162902832, 1.2348683655261994], [0.019999999552965164] * 2
    assert (plateau["best"], plateau["wait"], plateau["cooldown_counter"]) == (epochs[0], 0, 2)
    assert (stop["best"], stop["best_epoch"], stop["wait"], stop["stopped_epoch"]) == (epochs[1], 1, 0, 0)
    weights = [Checkpoint.open(SAVED).read(f"callbacks/EarlyStopping:loss/best_weights/{n}") for n in range(2)]
    assert [w.tobytes() for w in stop["best_weights"]] == [w.tobytes() for w in weights]
    assert {"loss": epochs, "learning_rate": rates}.items() == {k: v[:2] for k, v in history["history"].items()}.items()
    assert (best["best"], best["_batches_seen_since_last_saving"], best["_last_batch_seen"]) == (
        1.09481680393219,
        1,
        12,
    )
    assert board["_global_train_batch"] == 13
    assert rate == pytest.approx(0.01)
    assert average.get("batches", 0) == 0
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("These callback states in the checkpoint are not restored: Average. ")
