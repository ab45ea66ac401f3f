"""Two processes end alike: at their best, and early."""

import json
import pathlib
import sys

import keras
import numpy as np
import pytest

from tests import processes
from tfdist.checkpoint.format import Checkpoint, newest

pytestmark = pytest.mark.processes

SECONDS = 300.0
TRAIN = [sys.executable, "-m", "tfdist.train", "--dataset=digits", "--model=mlp(hidden=(8,))", "--output_dir=run"]


@pytest.mark.smoke
def test_two_processes_end_early_and_export_the_average_of_the_best_step(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ends = ["--best=val_loss", "--early_stopping=val_loss(patience=2, min_delta=100)", "--ema=0.5", "--eval_every=3"]
    diverging = ["--optimizer=sgd(momentum=0.95)", "--learning_rate=3", "--strategy=multiworker"]
    said = "early stopping at step 9: val_loss has not improved for 2 evaluations since step 3"
    for steps, told in ((50, f"E{said[1:]}."), (99, f"This run has finished by {said}. Its model is run/model.keras.")):
        outputs = processes.finish([*TRAIN, *ends, *diverging, f"--steps={steps}"], 2)
        assert [told in output for output in outputs] == [True, False]
    run = pathlib.Path("run")
    losses = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses |= {record["step"]: record["loss"]} if record["kind"] == "eval" else {}
    assert list(losses) == [3, 6, 9]
    best = min(losses, key=losses.__getitem__)
    path = next(path for path in newest(run / "checkpoints") if path.name == f"step-{best:09d}")
    saved = Checkpoint.open(path)
    averages = [saved.read(name) for name in saved.values["order"] if "average" in name]
    for found, wanted in zip(keras.saving.load_model(run / "model.keras").get_weights(), averages, strict=True):
        np.testing.assert_array_equal(found, wanted)
