"""The best checkpoint is kept, restored and exported, and early stopping counts evaluations; both resume exactly."""

import keras
import numpy as np
import pytest

import tfdist
from tests.checkpoint.damaging import flip_last
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, make_trainer, tensors
from tests.end_to_end.resume.saving_test import steps_of
from tfdist.checkpoint.best import BestValue
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.errors import InputError

# Other labels than those of training, so that the loss grows after the first steps.
OTHERS = (IMAGES[::-1], np.roll(LABELS, 7))
STEPS = 30


class Weights(keras.callbacks.Callback):
    """Keeps the weights of each step at which the run evaluates."""

    def __init__(self):
        super().__init__()
        self.at = {}

    def on_evaluation(self, step, logs):
        self.at[step] = [w.tobytes() for w in self.model.get_weights()], logs["val_loss"]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def fit(trainer, directory, steps=STEPS, eval_every=4, callbacks=(), **options):
    options = {"best": "val_loss", "keep": 2} | options
    return trainer.fit(
        (IMAGES, LABELS),
        batch_size=8,
        steps=steps,
        validation_data=OTHERS,
        schedule=tfdist.Schedule(eval_every=eval_every, steps_per_call=3),
        checkpoints=tfdist.Checkpoints(directory=str(directory), **options),
        callbacks=callbacks,
    )


def make(strategy, **options):
    return make_trainer(strategy, optimizer=lambda: keras.optimizers.Adam(0.02), **options)


@pytest.mark.parametrize(("eval_every", "ema"), [(4, 0.5), pytest.param(0, 0.0, marks=pytest.mark.full)])
def test_the_best_checkpoint_stays_and_is_restored(eval_every, ema, mirrored2, tmp_path):
    trainer, seen = make(mirrored2, ema=ema), Weights()
    history = fit(trainer, tmp_path, eval_every=eval_every, callbacks=[seen], every="5")
    losses = {record["step"]: record["loss"] for record in history.records if record["kind"] == "eval"}
    step = min(losses, key=lambda each: (losses[each], each))
    assert step < 24, "the best is not among the newest"
    assert trainer.best == BestValue("val_loss", "min", losses[step], step)
    assert steps_of(tmp_path) == [30, 25, step]
    assert (trainer.step, trainer.load_best(), trainer.step) == (30, trainer.best, step)
    assert [w.tobytes() for w in trainer.model.get_weights()] == seen.at[step][0]
    assert trainer.evaluate(OTHERS, batch_size=8)["loss"] == losses[step]


def test_it_is_the_same_after_a_stop(single, tmp_path):
    fit(make(single), tmp_path / "whole", every="7")
    for steps in (21, STEPS):
        trainer = make(single)
        trainer.resume(tmp_path / "parts")
        fit(trainer, tmp_path / "parts", steps=steps, every="7")
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    for one, other in zip(
        complete_checkpoints(tmp_path / "parts"), complete_checkpoints(tmp_path / "whole"), strict=True
    ):
        assert Checkpoint.open(one).values["best"] == Checkpoint.open(other).values["best"]
        assert tensors(one) == tensors(other)


def test_the_best_of_another_directory_is_not_counted(single, tmp_path, caplog):
    fit(make(single), tmp_path / "one", steps=12, eval_every=2)
    trainer = make(single)
    trainer.resume(complete_checkpoints(tmp_path / "one")[0])
    caplog.set_level("INFO")
    fit(trainer, tmp_path / "two", steps=20, eval_every=2)
    assert "has no checkpoint in" in caplog.text
    assert trainer.best.step > 12 and trainer.best.step in steps_of(tmp_path / "two")


def test_a_damaged_one_is_a_warning(single, tmp_path, caplog):
    trainer = make(single)
    fit(trainer, tmp_path)
    path = next(path for path in complete_checkpoints(tmp_path) if path.name.endswith(f"{trainer.best.step:09d}"))
    flip_last(path / "shard-00000.safetensors")
    before = [w.tobytes() for w in trainer.model.get_weights()]
    assert trainer.load_best() is None
    assert f"The checkpoint of the best step, {trainer.best}, cannot be used." in caplog.text
    assert [w.tobytes() for w in trainer.model.get_weights()] == before


def test_a_metric_without_a_known_direction_cannot_be_followed(single, tmp_path):
    with single.scope():
        model = keras.Sequential([keras.layers.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = ["accuracy", keras.metrics.MeanMetricWrapper(lambda y, p: y, name="mine")]
        trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss, metrics=metrics)
    with pytest.raises(InputError, match="Add mode=max or mode=min, as in val_mine"):
        fit(trainer, tmp_path, best="val_mine")


def test_early_stopping_counts_evaluations(mirrored2, tmp_path, caplog):
    caplog.set_level("INFO")
    stop = tfdist.EarlyStopping(patience=2)
    trainer = make(mirrored2)
    history = fit(trainer, tmp_path, eval_every=2, callbacks=[stop])
    losses = {record["step"]: record["loss"] for record in history.records if record["kind"] == "eval"}
    ended = max(losses)
    assert trainer.step == ended < STEPS
    assert list(losses) == list(range(2, ended + 1, 2))
    best = min(losses, key=losses.__getitem__)
    assert stop.reason == (
        f"early stopping at step {ended}: val_loss has not improved for 2 evaluations since step {best}"
    )
    assert ended == best + 4
    assert f"E{stop.reason[1:]}." in caplog.text
    assert steps_of(tmp_path)[0] == ended
    again, other = make(mirrored2), tfdist.EarlyStopping(patience=2)
    again.resume(tmp_path)
    fit(again, tmp_path, eval_every=2, callbacks=[other])
    assert (again.step, other.reason) == (ended, stop.reason)


@pytest.mark.parametrize("stopped_at", [pytest.param(3, marks=pytest.mark.full), 8])
def test_early_stopping_is_the_same_after_a_stop(stopped_at, single, tmp_path):
    def run(name, steps):
        trainer, stop = make(single), tfdist.EarlyStopping(patience=3, min_delta=0.01)
        trainer.resume(tmp_path / name)
        fit(trainer, tmp_path / name, steps=steps, eval_every=2, callbacks=[stop])
        return trainer.step, stop.reason, stop.best, stop.wait

    wanted = run("whole", STEPS)
    assert wanted[0] > 8
    run("parts", stopped_at)
    assert run("parts", STEPS) == wanted
    assert tensors(complete_checkpoints(tmp_path / "parts")[0]) == tensors(complete_checkpoints(tmp_path / "whole")[0])
