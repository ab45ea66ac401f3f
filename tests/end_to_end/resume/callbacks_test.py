"""Callbacks resume with the run, which ends as if it had not been stopped."""

import pathlib
import re
import shutil

import keras
import pytest

import tfdist
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, make_trainer, tensors
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints

STEPS = 40  # epochs of 5 steps; early stopping ends the run before
DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "guides" / "checkpoints.md"


def documented():
    [code] = re.findall(r"```python\n(class .*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names = {"keras": keras}
    exec(code, names)
    return names["WeightAverage"]


def callbacks(directory):
    average = documented()
    best = directory / "best.weights.h5"
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0, cooldown=1),
        keras.callbacks.EarlyStopping("loss", patience=3, min_delta=0.3, restore_best_weights=True),
        average(),
        type("AverageOfBatches", (average,), {"on_train_batch_end": average.on_epoch_end})(),
        keras.callbacks.History(),
        keras.callbacks.ModelCheckpoint(best, "loss", save_best_only=True, save_weights_only=True, save_freq=4),
        keras.callbacks.TensorBoard(directory / "events", write_graph=False),
    ]


def train(trainer, directory):
    own = callbacks(directory)
    checkpoints = tfdist.Checkpoints(directory=str(directory), every="1", keep=STEPS)
    data = (IMAGES, LABELS)
    trainer.fit(
        data,
        batch_size=8,
        steps=STEPS,
        schedule=tfdist.Schedule(steps_per_call=3),
        callbacks=own,
        checkpoints=checkpoints,
    )
    return own


def known(own):
    _, plateau, stop, *averages = own[:5]
    return (
        *(plateau.best, plateau.wait, plateau.cooldown_counter),
        *(stop.best, stop.wait, stop.best_epoch, stop.stopped_epoch),
        *((average.epochs, [total.tobytes() for total in average.sums]) for average in averages),
    )


def make(strategy):
    return make_trainer(strategy, optimizer=lambda: keras.optimizers.Adam(0.02))


@pytest.fixture(scope="module")
def whole(mirrored2, tmp_path_factory):
    """A run that was not stopped: its number of steps, the state of its callbacks, its weights, and its directory."""
    directory = tmp_path_factory.mktemp("whole")
    trainer = make(mirrored2)
    own = train(trainer, directory)
    return trainer.step, known(own), [w.tobytes() for w in trainer.model.get_weights()], directory


@pytest.mark.parametrize("stopped_at", [13, 15, 20])
def test_a_run_ends_as_if_nobody_had_stopped_it(stopped_at, whole, mirrored2, tmp_path):
    """Stopped in the middle of an epoch, and at the ends of two epochs."""
    steps, knew, weights, directory = whole
    assert 20 < steps < STEPS, "the early stop is behind all stops"
    shutil.copytree(directory / f"step-{stopped_at:09}", tmp_path / f"step-{stopped_at:09}")
    trainer = make(mirrored2)
    assert trainer.resume(tmp_path) == stopped_at
    own = train(trainer, tmp_path)
    assert trainer.step == steps
    assert known(own) == knew
    assert [w.tobytes() for w in trainer.model.get_weights()] == weights
    end, wanted = complete_checkpoints(tmp_path)[0], complete_checkpoints(directory)[0]
    assert tensors(end) == tensors(wanted)
    assert Checkpoint.open(end).values == Checkpoint.open(wanted).values


def test_a_run_that_early_stopping_has_stopped_is_over(whole, mirrored2, tmp_path, caplog):
    steps, _, weights, directory = whole
    shutil.copytree(directory / f"step-{steps:09}", tmp_path / f"step-{steps:09}")
    trainer = make(mirrored2)
    trainer.resume(tmp_path)
    with caplog.at_level("INFO"):
        train(trainer, tmp_path)
    assert trainer.step == steps
    assert [w.tobytes() for w in trainer.model.get_weights()] == weights, "the best ones are back"
    assert (
        f"This run was already stopped by EarlyStopping at step {steps}: there is nothing left to train." in caplog.text
    )
