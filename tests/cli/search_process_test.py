"""`--find` with real processes: ranks agree on a learning rate, and trials of a batch size end at the memory limit."""

import json
import pathlib
import re
import sys

import pytest

from tests import documented_json, processes
from tests.user_commands import captured

pytestmark = pytest.mark.processes

SECONDS = 300.0
TRAIN = [sys.executable, "-m", "tfdist.train"]
LIMIT = 700 * 2**20
MLP = ["--dataset=digits", "--model=mlp(hidden=(8,))"]
# 512,000 activations per example and few weights: a batch of 64 examples needs some 600 MiB, one of 128 more than 800.
WIDE = """
import keras

def wide(input_shape, classes):
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Reshape((64, 1))(x)
    x = keras.layers.Dense(8000, activation="tanh")(x)
    x = keras.layers.Dense(2, activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.Flatten()(x)))
"""


@pytest.mark.parametrize("strategy", ["multiworker", pytest.param("horovod", marks=pytest.mark.full)])
@pytest.mark.smoke("multiworker")
def test_two_processes_agree_on_a_learning_rate(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    search = "--find=learning_rate(min=1e-5, max=100, steps=40)"
    with processes.job([*TRAIN, *MLP, search, f"--strategy={strategy}", "--output_dir=run"], 2) as job:
        ended = job.wait(SECONDS)
    assert [end.code for end in ended] == [0, 0], "\n".join(end.output for end in ended)
    assert ["Suggested learning rate" in end.output for end in ended] == [True, False]
    assert ["run/find/learning_rate.png" in end.output for end in ended] == [True, False]
    found = json.loads(pathlib.Path("run/find/learning_rate.json").read_text())
    assert found["batch_size"] == 64 and 1e-4 < found["suggestion"] < found["lowest"] < found["diverged"]
    assert sorted(path.name for path in pathlib.Path("run").iterdir()) == ["find"]


def test_trials_of_a_batch_size_end_at_the_memory_limit(tmp_path):
    (tmp_path / "wide_of_test.py").write_text(WIDE)
    flags = ["--dataset=digits", "--model=wide_of_test:wide", "--strategy=single", "--batch_size=64"]
    flags += ["--output_dir=run", "--find=batch_size(memory=700MiB, steps=4, max=128)"]
    done = captured([*TRAIN, *flags], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run/find/batch_size.json").read_text())
    documented_json.check_file("find/batch_size.json", found)
    refused = [trial for trial in found["trials"] if trial["failure"]]
    assert refused and all(trial["failure"] == "more than 700.0 MiB" for trial in refused)
    assert all(trial["memory_bytes"] > LIMIT for trial in refused)
    usable = [trial for trial in found["trials"] if not trial["failure"]]
    assert all(trial["memory_bytes"] <= LIMIT and trial["examples_per_second"] > 0 for trial in usable)
    assert found["largest"] == usable[-1]["batch_size"] == 64 and found["fastest"] in [t["batch_size"] for t in usable]
    assert re.search(
        rf"Largest that fits into 700.0 MiB: {found['largest']}\. Fastest: {found['fastest']},", done.stdout
    )
    assert f"Train with --batch_size={found['fastest']}." in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["batch_size.json", "batch_size.png", "find"]
