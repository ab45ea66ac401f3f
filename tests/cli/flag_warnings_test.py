"""Suspicious flags, as a user of the commands sees them: one line each, in the log of the run as well."""

import json
import pathlib

import pytest

from tfdist import train, verify
from tfdist.cli import command, flags
from tfdist.config.train_config import VerifyConfig
from tfdist.reporting import warn_once

QUICK = ("--dataset=digits", "--model=mlp(hidden=(4,))", "--strategy=single")
LINEAR = "--model=nan_of_test:linear"


@pytest.fixture(autouse=True)
def without_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def trained(capfd: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Returns the texts of the warnings on the terminal."""
    argv = ("train", *QUICK, "--output_dir=run", *argv)
    assert command.run("train", flags.define, lambda values: train.main(flags.config(values)), argv) == 0
    log = pathlib.Path("run/logs/rank-0.log").read_text()
    lines = [line for line in capfd.readouterr().err.splitlines() if " WARNING rank 0: " in line]
    # TensorFlow's own, about the many functions of this process's tests.
    texts = [line.partition(": ")[2] for line in lines if "retracing" not in line]
    assert all(text in log for text in texts)
    return texts


@pytest.mark.tensorflow
def test_flags_without_effect_and_a_suspicious_run_are_said_once_each(capfd):
    without_effect = ("--bucket_mb=8", "--keep=1", "--data_dir=x", "--batch_norm=synchronized", "--intra_op_threads=2")
    texts = trained(capfd, *without_effect, "--steps=2", "--batch_size=1500", "--eval_every=3")
    assert sorted(text.partition("=")[0] for text in texts if "has no effect" in text) == sorted(
        flag.partition("=")[0] for flag in without_effect
    )
    assert len(texts) == len(without_effect) + 2
    assert "A batch of 1500 examples" in texts[-2] and "eval_every=3" in texts[-1]


@pytest.mark.tensorflow
def test_an_ordinary_run_warns_of_nothing(capfd):
    assert trained(capfd, "--steps=2", "--checkpoint_every=2", "--keep=1", "--strategy=mirrored", "--devices=2") == []
    [start] = pathlib.Path("run/starts.jsonl").read_text().splitlines()
    assert json.loads(start)["ledgers"] == 1, "replicas of a process share one"


@pytest.mark.tensorflow
def test_a_finished_run_with_nan_in_its_evaluations_ends_with_its_summary(capfd, monkeypatch, tmp_path):
    (tmp_path / "nan_of_test.py").write_text(
        "import numpy as np\n"
        "def data():\n"
        "    x, y = np.ones((8, 3), 'float32'), np.arange(8) % 2\n"
        "    return (x, y), (x * np.float32('nan'), y)\n"
        "def linear(input_shape, classes):\n"
        "    import keras\n"
        "    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(2)])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = (LINEAR, "--dataset=nan_of_test:data", "--batch_size=8", "--steps=2", "--checkpoint_every=2")
    [text] = trained(capfd, *argv)
    assert "The evaluation data has NaN or inf in columns 0, 1 and 2 of x" in text
    warn_once.logged_situations.clear()
    # A change of what ends the run continues it, and the record is read from metrics.jsonl, where NaN is a text.
    argv = ("train", *QUICK, "--output_dir=run", *argv, "--early_stopping=val_loss")
    command.run("train", flags.define, lambda v: train.main(flags.config(v)), argv)
    assert "eval after 2 steps: loss nan" in capfd.readouterr().out


@pytest.mark.tensorflow
def test_verify_of_one_device_says_that_it_shows_nothing(caplog):
    for strategy in ("single", "mirrored"):
        warn_once.logged_situations.clear()
        caplog.clear()
        verify.main(VerifyConfig(strategy=strategy, model="mlp(hidden=(4,))", steps=1))
        [text] = [record.getMessage() for record in caplog.records if record.name == warn_once.__name__]
        assert text.startswith(f"Strategy {strategy} has one device here, so one device is compared with itself")
