"""User errors: exit code 2, one line with the cause and the remedy, and no other output."""

import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence

import pytest

from tests.user_commands import captured
from tfdist import train
from tfdist.cli import command, flags

QUICK = ("--dataset=digits", "--model=mlp", "--steps=1")
OWN_MODULES = {
    "broken_of_test.py": "import a_package_that_nobody_has",
    "own_of_test.py": "def raising(classes):\n    raise RuntimeError('too few\\nlayers')",
    "data_of_test.py": (
        "import numpy as np\nx = np.ones((8, 4), 'float32')\n"
        "def two(input_shape, classes):\n"
        "    import keras\n    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(2)])\n"
        "def outside(): return x, np.array([0, 1, 2, 2, 1, 0, 1, 0])\n"
        "def mixed(): return x, np.array(['cat', None] * 4, dtype=object)\n"
    ),
    "full/file.txt": "something",
}
CLEARED = (
    *("TFDIST_COMMITS", "TF_CONFIG", "KERAS_HOME", "TFDS_DATA_DIR", "TPU_NAME"),
    *("RANK", "WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"),
)
DATA = "--model=data_of_test:two --dataset=data_of_test:"
TWO_DEVICES = "--strategy=mirrored --devices=2"
MESH = "--strategy=mesh --mesh_shape=data"
# By what is wrong: flags, and words of the answer. Other rows are in tests/cli/wrong_uses.tsv.
ROWS: dict[str, tuple[str, ...]] = {
    "sources disagree": ("", "must give this process the same rank and size", "TF_CONFIG", "Horovod"),
    "one process among two": ("--strategy=mirrored", "--strategy=mirrored", "--strategy=auto"),
    "fashion_mnist": ("--dataset=fashion_mnist", "fashion_mnist", "--data_dir"),
    "tfds": ("--dataset=tfds:mnist --data_dir=nothing", "tfds:mnist", "tfds build mnist"),
    "a table without label": ("--dataset=csv:own_of_test.py", "column of the label", "Add label="),
    "records without features": ("--dataset=tfrecord:own_of_test.py", "must be complete", "own_of_test.py"),
    "augmentation of text": ("--augment=flip --dataset=text --model=transformer", "requires images", "int32[128]"),
    "model does not import": ("--model=broken_of_test:f", "broken_of_test", "a_package_that_nobody_has"),
    "model raises": ("--model=own_of_test:raising", "--model=own_of_test:raising", "too few layers", "own_of_test.py"),
    "loss does not fit": ("--loss=mean_squared_error", "y int32[]", "--loss"),
    "metric does not fit": ("--metrics=auc", "y int32[]", "--metrics"),
    "labels outside": (f"{DATA}outside", "Labels must be in 0..1", "y with 2 (2 of 8", "3 units"),
    "labels mixed": (f"{DATA}mixed", "NoneType and str", "Replace missing values"),
    "no TPU": ("--strategy=tpu", "--strategy=tpu", "--tpu=NAME"),
    "batch too small": (f"{TWO_DEVICES} --batch_size=1", "--batch_size=1", "2 replicas"),
    "batch of one replica": (f"{TWO_DEVICES} --batch_size=7 --elastic_batch=replica", "--batch_size=7", "6 or 8"),
    "mesh has too many CPU devices": (f"{MESH}:2000", "at most 32 logical CPU", "2000 devices", "tfdist layout"),
    "axis twice in a variable": (
        f"{MESH}:2;model:2 --layout=in:model;out:model",
        "in and out of",
        "kernel on the axis",
    ),
    "axis does not divide": (
        f"{MESH}:1;model:4 --layout=out:model",
        "shards out of",
        "over the 4 devices",
        "out of size 10",
    ),
    "convolution is split": (
        f"{MESH}:2;model:2 --model=cnn --layout=out:model",
        "shard kernels of convolutions",
        "tfdist.name_dims",
    ),
    "mesh does not divide the batch": (f"{MESH}:4 --batch_size=6", "--batch_size=6", "4 replicas", "4 or 8"),
    "axis without sharding": (f"{MESH}:4 --shard_axis=data", "--shard_axis=data", "--shard=none"),
    "commits never": ("--commit_dir=full", "--commit_dir=full", "needs --commit_every: add it"),
    "learning rate twice": (
        "--optimizer=sgd(learning_rate=0.1) --learning_rate=0.2",
        "--learning_rate=0.2",
        "leave out --learning_rate",
    ),
}
TWO = {"cluster": {"worker": ["127.0.0.1:2", "127.0.0.1:3"]}, "task": {"type": "worker", "index": 0}}
VARIABLES: dict[str, dict[str, str]] = {
    "sources disagree": {"TF_CONFIG": json.dumps(TWO)}
    | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
    "one process among two": {"TF_CONFIG": json.dumps(TWO)},
    "fashion_mnist": {"KERAS_HOME": "nothing"},
}


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Runs in a directory with the user's modules, without environment variables that affect the command."""
    for name in (*CLEARED, "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    for name, text in OWN_MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def assert_one_line(code: int, out: str, err: str, words: Sequence[str]) -> None:
    assert code == 2, err
    assert out == ""
    # Data that does not fit the model is detected after the run has begun, so that its end is reported, too.
    # TensorFlow counts the traces of all tests of a process.
    ours = r".* (INFO rank 0: Loading TensorFlow took|triggered tf.function retracing)|run ended: bad input"
    started = r"(model|data|strategy|chosen|batch|length|output) +\S"
    lines = [line for line in err.splitlines() if not re.match(f"{ours}|{started}", line)]
    assert len(lines) == 1, err
    assert lines[0].startswith("tfdist train: ")
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize("row", ROWS)
def test_in_this_process(row: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    given, *words = ROWS[row]
    monkeypatch.setattr("tfdist.data.images.SYSTEM_FOLDER", "nothing")  # may exist on this machine
    for name, value in VARIABLES.get(row, {}).items():
        monkeypatch.setenv(name, value)
    argv = ("train", *QUICK, "--output_dir=run", *given.split())
    code = command.run("train", flags.define, lambda values: train.main(flags.config(values)), argv)
    assert_one_line(code, *capfd.readouterr(), words)


def start(argv: tuple[str, ...], environment: dict[str, str]) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tfdist.train", *QUICK, "--output_dir=run", *argv]
    done = captured(command, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("row", ["model raises", pytest.param("no TPU", marks=pytest.mark.smoke("tpu"))])
def test_as_a_process(row: str) -> None:
    given, *words = ROWS[row]
    assert_one_line(*start(tuple(given.split()), VARIABLES.get(row, {})), words)


@pytest.mark.processes
def test_without_horovod(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "missing" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no Horovod here')")
    result = start(("--strategy=horovod",), {"PYTHONPATH": str(package.parent)})
    assert_one_line(*result, ("no Horovod here", "tfdist install_horovod"))
