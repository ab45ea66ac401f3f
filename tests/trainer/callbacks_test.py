"""Keras's callbacks: they get the usual logs, only the chief writes files, and a stop applies to all processes."""

import keras
import numpy as np
import pytest
from tfdist.strategies.single import Single

import tfdist
from tfdist.cluster.environment import Cluster
from tfdist.errors import InputError
from tfdist.trainer.callbacks import Callbacks, callbacks_of_process

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((16, 3)).astype("float32")
Y = RANDOM.standard_normal((16, 1)).astype("float32")
BOTH = ((X, Y), (X[:5], Y[:5]))


def make_trainer(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
        return tfdist.Trainer(model, optimizer="sgd", loss="mse", metrics=["mae"])


class OtherRank(Single):
    """The strategy of a process that is not the chief."""

    def __init__(self, group):
        super().__init__(cluster=Cluster(rank=1, size=2), join=lambda cluster: group)


class OtherStops:
    """A group in which another process requests a stop at a step."""

    def __init__(self, at):
        self.at, self.asked = at, []

    def gather(self, name, value, deadline=60.0):
        self.asked.append(name)
        return [value, name == f"callbacks/stop/{self.at}"]


def test_logs(mirrored2):
    seen: dict[str, list] = {"batch": [], "epoch": [], "train": []}
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen["batch"].append((batch, set(logs))),
        on_epoch_end=lambda epoch, logs: seen["epoch"].append((epoch, dict(logs))),
        on_train_end=lambda logs: seen["train"].append(logs),
    )
    trainer = make_trainer(mirrored2)
    history = trainer.fit(BOTH, batch_size=4, epochs=2, schedule=tfdist.Schedule(steps_per_call=2), callbacks=[keep])
    assert seen["batch"] == [(step, {"loss", "mae"}) for step in (1, 3, 5, 7)]
    assert [epoch for epoch, _ in seen["epoch"]] == [0, 1]
    assert set(seen["epoch"][0][1]) == {"loss", "mae", "val_loss", "val_mae"}
    last = history.last("eval")
    assert seen["epoch"][1][1]["val_mae"] == last["mae"]
    assert seen["epoch"][1][1]["val_loss"] == last["loss"]
    assert len(seen["train"]) == 1


def test_early_stopping_stops_and_brings_back_the_best_weights(single):
    best = []
    trainer = make_trainer(single)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, mode="max", restore_best_weights=True)
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: best.append(trainer.model.get_weights()) if not epoch else None
    )
    trainer.fit(BOTH, batch_size=4, epochs=9, callbacks=[keep, stop])
    assert trainer.step == 2 * 4, "the loss falls, so the second epoch is no better"
    for a, b in zip(trainer.model.get_weights(), best[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_stop_training(mirrored2):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch >= 2

    trainer = make_trainer(mirrored2)
    trainer.fit((X, Y), batch_size=4, steps=12, schedule=tfdist.Schedule(steps_per_call=1), callbacks=[Stop()])
    assert trainer.step == 3
    trainer.fit((X, Y), batch_size=4, steps=2)
    assert trainer.step == 5, "a stop is of one run"


def test_a_stop_on_another_process_stops_this_one(single):
    group = OtherStops(at=6)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    callbacks = Callbacks([keras.callbacks.Callback()], model, OtherRank(group))
    assert [callbacks.should_stop(step) for step in (2, 4, 6)] == [False, False, True]
    assert model.stop_training
    assert group.asked == ["callbacks/any", *(f"callbacks/stop/{step}" for step in (2, 4, 6))]


def test_without_callbacks_nobody_is_asked():
    group = OtherStops(at=0)
    callbacks = Callbacks([], keras.Sequential(), OtherRank(group))
    assert not callbacks.should_stop(0)
    assert group.asked == ["callbacks/any"]


def test_files_are_written_by_the_chief(single, tmp_path):
    def writers(directory):
        return [
            keras.callbacks.ModelCheckpoint(str(directory / "{epoch}.keras")),
            keras.callbacks.TensorBoard(str(directory / "tensorboard")),
            keras.callbacks.CSVLogger(str(directory / "log.csv")),
        ]

    trainer = make_trainer(single)
    (tmp_path / "chief").mkdir()
    trainer.fit(BOTH, batch_size=4, epochs=2, callbacks=writers(tmp_path / "chief"))
    names = {path.name for path in (tmp_path / "chief").iterdir()}
    assert names == {"1.keras", "2.keras", "tensorboard", "log.csv"}
    assert "val_mae" in (tmp_path / "chief/log.csv").read_text().splitlines()[0]
    assert list((tmp_path / "chief/tensorboard").rglob("events*"))

    other = tmp_path / "other"
    other.mkdir()
    callbacks = Callbacks(writers(other), trainer.model, OtherRank(OtherStops(at=-1)), epochs=1, steps=1)
    callbacks.on_train_begin()
    callbacks.on_epoch_end(0, {"loss": 1.0})
    callbacks.on_train_end()
    assert not list(other.iterdir())


def test_a_checkpoint_holds_the_epoch_s_weights(mirrored2, tmp_path):
    trainer = make_trainer(mirrored2)
    path = str(tmp_path / "model.keras")
    trainer.fit((X, Y), batch_size=4, epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    for a, b in zip(keras.saving.load_model(path).get_weights(), trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Spread(OtherRank):
    """A strategy whose processes have different blocks of a variable."""

    @property
    def blocks(self):
        blocks = super().blocks
        blocks.spans_processes = True
        return blocks


def test_the_chief_reads_no_variables_that_span_processes(tmp_path):
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras")
    assert callbacks_of_process([saves], OtherRank(OtherStops(0))) == []
    with pytest.raises(InputError, match="the chief cannot read all weights by itself. Received: ModelCheckpoint"):
        callbacks_of_process([saves], Spread(OtherStops(0)))
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(InputError, match="the chief cannot read all weights by itself. Received: BackupAndRestore"):
        callbacks_of_process([backup], Spread(OtherStops(0)), broadcasts_weights=True)
    logs = keras.callbacks.CSVLogger(tmp_path / "logs.csv")
    assert callbacks_of_process([logs], Spread(OtherStops(0))) == []
