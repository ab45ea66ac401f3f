"""The evaluator of a training job: in this process, on the checkpoints of a run, and beside parameter servers."""

import json
import logging
import shutil
import sys

import pytest

from tests import processes
from tfdist import evaluate, train
from tfdist.cli import evaluator
from tfdist.cli.flags import flags_text
from tfdist.config.train_config import TrainConfig
from tfdist.config.trained_config import EvaluateConfig
from tfdist.reporting import RunDirectory
from tfdist.reporting.run_summary import read_run
from tfdist.storage import path_of
from tfdist.trainer.trainer import Trainer

TASK = '{"task": {"type": "evaluator", "index": 0}}'
OPTIONS = {"strategy": "mirrored", "devices": 2, "model": "cnn(filters=(4,))", "optimizer": "adam", "keep": 9}


def config(directory, **options) -> TrainConfig:
    return TrainConfig(**OPTIONS | {"steps": 8, "checkpoint_every": "2", "output_dir": str(directory)} | options)


def evaluations(directory) -> dict[int, dict[str, float]]:
    """Returns the results of the evaluator by step."""
    lines = (directory / "evaluations.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all(record["kind"] == "eval" for record in records)
    results = {record["step"]: {name: record[name] for name in ("loss", "accuracy")} for record in records}
    assert len(results) == len(records)  # no checkpoint twice
    return results


def results_of(directory, step: int) -> dict[str, float]:
    """Returns the results of `tfdist evaluate`."""
    checkpoint, path = f"{directory}/checkpoints/step-{step:09d}", directory.parent / "results.json"
    assert evaluate.main(str(directory), EvaluateConfig(checkpoint=checkpoint, output=str(path))) == 0
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_each_checkpoint_is_evaluated_once(ema, tmp_path, monkeypatch, caplog):
    run, damaged, removed = tmp_path / "run", 4, 6
    flags = config(run, ema=ema)
    assert train.main(flags) == 0
    expected = {step: results_of(run, step) for step in (2, 8)}
    load, slots = Trainer.load_weights, set()

    def load_during_training(trainer, path, **options):
        if path.name.endswith(str(damaged)):
            next(path.glob("*.safetensors")).write_bytes(b"")
        if path.name.endswith(str(removed)):
            shutil.rmtree(path)
        load(trainer, path, **options)
        slots.add(len(trainer.model.optimizer.variables) - 2)  # without the step and the learning rate

    monkeypatch.setattr(Trainer, "load_weights", load_during_training)
    monkeypatch.setenv("TF_CONFIG", TASK)
    with caplog.at_level(logging.INFO):
        assert train.main(flags) == 0
    assert evaluations(run) == {step: pytest.approx(values, rel=1e-6) for step, values in expected.items()}
    assert slots == {0} if not ema else 0 not in slots
    lines = [message for message in caplog.messages if message.startswith(("Skipped", "eval after"))]
    assert [line.split(":")[0] for line in lines[:2]] == ["eval after 2 steps", "Skipped step-000000004"]
    assert lines[2] == "Skipped step-000000006, which has been removed (--keep=9)." and len(lines) == 4
    assert " INFO evaluator: eval after 8 steps: loss" in (run / "logs/evaluator.log").read_text()
    assert list((run / "tensorboard/evaluator/eval").iterdir())
    assert train.main(flags) == 0  # started again
    assert evaluations(run).keys() == {2, 8} == {r["step"] for r in read_run(path_of(run), "run").evaluations}


def test_only_complete_checkpoints_of_this_run_are_returned_until_its_end(tmp_path):
    flags = config(tmp_path, overwrite=True)
    directory, checkpoints = RunDirectory(path_of(tmp_path)), tmp_path / "checkpoints"
    watcher = evaluator.CheckpointWatcher(directory, vars(flags), "this job")

    def begin(job: str) -> None:
        directory.begin(flags_text(flags), ["host"], facts={"job_name": job})

    def names() -> list[str]:
        return [path.name for path in watcher.new_checkpoints()]

    assert not names() and not watcher.is_finished  # before the run begins
    begin("an earlier job")
    (checkpoints / "step-000000009").mkdir(parents=True)
    assert not names()
    (checkpoints / "step-000000009").rmdir()
    begin("this job")
    for name in ("step-000000010", "step-000000002", ".step-000000004.partial", ".step-000000002.replaced"):
        (checkpoints / name).mkdir()
    assert names() == ["step-000000002", "step-000000010"] and not names()
    (checkpoints / ".step-000000004.partial").rename(checkpoints / "step-000000004")
    assert names() == ["step-000000004"] and not watcher.is_finished
    facts = {"best": "", "early_stopping": "", "callbacks": "", "reason": "", "step": 8, "epochs": 0}
    (tmp_path / "model.keras").write_text("model")
    directory.finish({**facts, "steps": 6})  # the flags ask for more
    assert not watcher.is_finished
    directory.finish({**facts, "steps": 8})
    assert watcher.is_finished


@pytest.mark.processes
@pytest.mark.full
def test_beside_parameter_servers_as_by_tfdist_evaluate(tmp_path):
    run = tmp_path / "run"
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--servers=1", "--evaluator"]
    launch += [f"--log_dir={tmp_path}"]
    flags = ["--staleness=async", "--model=transformer(layers=1,width=16,heads=2)", "--dataset=text(length=16)"]
    flags += ["--min_table_bytes=1", "--steps=60", "--checkpoint_every=20", f"--output_dir={run}"]
    train_command = [sys.executable, "-m", "tfdist.train", "--strategy=parameter_server", *flags]
    [output] = processes.finish([*launch, "--", *train_command], environment=processes.ONE_THREAD)
    found = evaluations(run)
    assert found == {step: pytest.approx(results_of(run, step), rel=1e-6) for step in (20, 40, 60)}
    assert output.count("[evaluator] ") == 3 and " INFO evaluator: eval after 60 steps" in output
