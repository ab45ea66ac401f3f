"""How a run of `tfdist train` ends: at its best, early, finished, or replaced by another one."""

import json
import pathlib
import sys

import keras
import numpy as np
import pytest

from tests import processes
from tfdist import train
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.reporting import RunDirectory

CALLBACKS = """
import keras

class Count(keras.callbacks.Callback):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        with open(self.path, "a") as file:
            print(epoch, sorted(logs), file=file)

def several(output_dir, name="epochs.txt"):
    return [Count(f"{output_dir}/{name}"), keras.callbacks.TerminateOnNaN()]

def one(output_dir):
    return Count(f"{output_dir}/one.txt")

def failing():
    raise RuntimeError("not today")
"""


def run(path: pathlib.Path, **flags) -> int:
    given = {"strategy": "single", "model": "mlp(hidden=(8,))", "dataset": "digits", "steps": 20}
    return train.main(TrainConfig(output_dir=str(path), **(given | flags)))


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    (tmp_path / "callbacks_of_test.py").write_text(CALLBACKS)
    monkeypatch.syspath_prepend(tmp_path)


def model_of(path: pathlib.Path) -> list[np.ndarray]:
    return keras.saving.load_model(path / "model.keras").get_weights()


def saved(path: pathlib.Path, step: int, *marks: str) -> list[np.ndarray]:
    """Returns the tensors of a checkpoint whose names have all the marks, in the order of the model's weights."""
    checkpoint = Checkpoint.open(path / "checkpoints" / f"step-{step:09d}")
    order = [name for name in checkpoint.values["order"] if all(mark in name for mark in marks)]
    return [checkpoint.read(name) for name in order]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ema", [pytest.param(0.0, marks=pytest.mark.full), 0.5])
def test_the_exported_model_is_that_of_the_best_step(ema, tmp_path, capsys):
    """With a learning rate at which the loss grows again."""
    path = tmp_path / "run"
    flags = {"learning_rate": 1.5, "optimizer": "sgd(momentum=0.95)", "eval_every": 2, "keep": 1, "ema": ema}
    assert run(path, best="val_loss", **flags) == 0
    losses = {r["step"]: r["loss"] for r in RunDirectory(path).records() if r["kind"] == "eval"}
    best = min(losses, key=losses.__getitem__)
    assert best < 20
    assert [int(p.name[-9:]) for p in complete_checkpoints(path / "checkpoints")] == [20, best]
    assert equal(model_of(path), saved(path, best, "optimizer/", "average") if ema else saved(path, best, "model/"))
    out = capsys.readouterr().out.splitlines()
    exported = f"best val_loss {losses[best]:.4f} at step {best}, exported as model.keras; trained to step "
    assert out[-5].startswith(exported) and out[-1] == str(path)
    assert out[-3] == "or train longer: the same command with more --epochs or --steps"


def test_a_run_that_has_finished_says_so_and_trains_no_more(tmp_path, capsys):
    path = tmp_path / "run"
    run(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    capsys.readouterr()
    for flags in ({}, {"steps": 10}, {"log_every": 3}):
        assert run(path, **flags) == 0
        assert capsys.readouterr().out == (
            f"This run has finished at step 20. Its model is in {path / 'model.keras'}. To start over, pass --overwrite.\n"
        )
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    for flags in ({"steps": 30}, {"seed": 3}, {"resume": "never"}):
        with pytest.raises(InputError, match="must be empty or new.*--overwrite deletes the run in this directory"):
            run(path, **flags)


@pytest.mark.full
def test_another_patience_continues_it(tmp_path):
    path, flags = tmp_path / "run", {"eval_every": 3, "checkpoint_every": "3"}
    run(path, **flags, early_stopping="val_loss(patience=2, min_delta=100)")
    run(path, **flags, early_stopping="val_loss(patience=4, min_delta=100)")
    assert json.loads((path / "finished.json").read_text())["step"] == 15


def test_a_run_is_overwritten(tmp_path):
    path, fresh = tmp_path / "run", tmp_path / "fresh"
    run(path, checkpoint_every="5")
    (path / "notes.txt").write_text("mine")
    assert run(path, checkpoint_every="8", steps=16, seed=3, overwrite=True) == 0
    run(fresh, checkpoint_every="8", steps=16, seed=3)
    assert (path / "notes.txt").read_text() == "mine"
    assert equal(model_of(path), model_of(fresh))
    assert [start["step"] for start in RunDirectory(path).read_starts()] == [0]
    names = [sorted(file.name for file in complete_checkpoints(each / "checkpoints")) for each in (path, fresh)]
    assert names[0] == names[1] == ["step-000000008", "step-000000016"]
    assert [r["step"] for r in RunDirectory(path).records()] == [r["step"] for r in RunDirectory(fresh).records()]
    assert "--overwrite=false\n" in (path / "flags.txt").read_text()
    assert run(path, checkpoint_every="8", steps=20, seed=3) == 0
    assert [start["step"] for start in RunDirectory(path).read_starts()] == [0, 16]


def test_a_directory_without_a_run_is_not(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="must be empty or new") as caught:
        run(tmp_path, overwrite=True)
    assert "--overwrite" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_checkpoint_that_would_be_deleted_is_no_beginning(tmp_path):
    run(tmp_path / "run", checkpoint_every="10")
    with pytest.raises(InputError, match="cannot start from a checkpoint that it deletes"):
        run(tmp_path / "run", overwrite=True, resume=str(tmp_path / "run"))
    assert len(complete_checkpoints(tmp_path / "run" / "checkpoints")) == 2


def test_callbacks_of_ones_own(own_code, tmp_path):
    path = tmp_path / "run"
    assert run(path, callbacks="callbacks_of_test:several(name='mine.txt')", epochs=2, steps=0) == 0
    logged = "['accuracy', 'loss', 'val_accuracy', 'val_loss']"
    assert (path / "mine.txt").read_text().splitlines() == [f"0 {logged}", f"1 {logged}"]
    assert run(tmp_path / "other", callbacks="callbacks_of_test:one") == 0
    assert (tmp_path / "other" / "one.txt").exists()


NOT_MEASURED = 'Received: val_acc. Did you mean "val_accuracy"?'


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"callbacks": "callbacks_of_test:failing"}, "must not fail. Received: RuntimeError: not today"),
        ({"callbacks": "callbacks_of_test:one(path=3)"}, 'no parameter "path"'),
        ({"best": "val_acc"}, NOT_MEASURED),
        ({"early_stopping": "val_acc"}, NOT_MEASURED),
    ],
)
def test_what_cannot_be_used_leaves_nothing(flags, message, own_code, tmp_path):
    with pytest.raises(InputError) as caught:
        run(tmp_path / "run", **flags)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def evaluations(path: pathlib.Path) -> list[int]:
    return [record["step"] for record in RunDirectory(path).records() if record["kind"] == "eval"]


@pytest.mark.parametrize(
    "steps", [20, pytest.param(23, marks=pytest.mark.full)], ids=["within an epoch", "with its end"]
)
def test_a_run_is_evaluated_at_its_end_once(steps, tmp_path):
    path = tmp_path / "run"
    run(path, steps=steps, eval_every=8, checkpoint_every="5")
    assert evaluations(path) == [8, 16, steps]
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "eval"
    for kept in (lines, lines[:-1]):  # it was killed after the last evaluation, or before
        (path / "finished.json").unlink()
        (path / "metrics.jsonl").write_text("".join(kept))
        run(path, steps=steps, eval_every=8, checkpoint_every="5")
        assert evaluations(path) == [8, 16, steps]
        assert (path / "metrics.jsonl").read_text().splitlines()[-1].startswith(lines[-1][:30])
        assert (path / "finished.json").exists()


def test_a_longer_run_has_no_trace_of_that_evaluation(tmp_path):
    flags = {"eval_every": 8, "checkpoint_every": "5", "decay": "plateau(patience=1, min_delta=100)"}
    run(tmp_path / "run", steps=20, **flags)
    run(tmp_path / "run", steps=30, **flags)
    run(tmp_path / "whole", steps=30, **flags)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole") == [8, 16, 24, 30]
    one, whole = (complete_checkpoints(tmp_path / name / "checkpoints")[0] for name in ("run", "whole"))
    assert Checkpoint.open(one).values == Checkpoint.open(whole).values
    assert equal(saved(tmp_path / "run", 30), saved(tmp_path / "whole", 30))


@pytest.mark.full
def test_a_run_that_ends_before_the_first_evaluation_is_not_evaluated(tmp_path):
    run(tmp_path / "run", eval_every=30)
    assert not evaluations(tmp_path / "run")


@pytest.mark.processes
@pytest.mark.smoke
def test_two_processes_end_early_and_export_the_average_of_the_best_step(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_digits = ["-m", "tfdist.train", "--dataset=digits", "--model=mlp(hidden=(8,))", "--output_dir=run"]
    ends = ["--best=val_loss", "--early_stopping=val_loss(patience=2, min_delta=100)", "--ema=0.5", "--eval_every=3"]
    diverging = ["--optimizer=sgd(momentum=0.95)", "--learning_rate=3", "--strategy=multiworker"]
    said = "early stopping at step 9: val_loss has not improved for 2 evaluations since step 3"
    for steps, told in (
        (50, f"E{said[1:]}."),
        (99, f"This run has finished ({said}). Its model is in run/model.keras."),
    ):
        outputs = processes.finish([sys.executable, *train_digits, *ends, *diverging, f"--steps={steps}"], 2)
        assert [told in output for output in outputs] == [True, False]
    run = pathlib.Path("run")
    losses = {r["step"]: r["loss"] for r in RunDirectory(run).records() if r["kind"] == "eval"}
    assert list(losses) == [3, 6, 9]
    assert equal(model_of(run), saved(run, min(losses, key=losses.__getitem__), "average"))
