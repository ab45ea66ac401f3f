"""User errors: exit code 2, one line with the cause and the remedy, and no other output."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests import jobs as processes
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
        "def one_hot(): return x, np.eye(2, dtype='float32')[[0, 1] * 4]\n"
        "def strings(): return x, np.array(['cat', 'dog'] * 4)\n"
        "def mixed(): return x, np.array(['cat', None] * 4, dtype=object)\n"
        "def empty(): return x[:0], np.zeros(0, int)\n"
    ),
    "full/file.txt": "something",
}
PORT_OF_RANK_1 = """
import json, os, runpy, socket, sys
config = json.loads(os.environ["TF_CONFIG"])
taken = socket.socket()
if config["task"]["index"] == 1:
    taken.bind(("127.0.0.1", int(config["cluster"]["worker"][1].rpartition(":")[2])))
    taken.listen()
sys.argv = sys.argv[1:]
runpy.run_module("tfdist.train", run_name="__main__", alter_sys=True)
"""
CLEARED = (
    *("TFDIST_COMMITS", "TF_CONFIG", "KERAS_HOME", "TFDS_DATA_DIR", "TPU_NAME"),
    *("RANK", "WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"),
)
CLUSTER = {"cluster": {"worker": ["127.0.0.1:2", "127.0.0.1:3"]}}
TWO = json.dumps({**CLUSTER, "task": {"type": "worker", "index": 0}})
# By what is wrong: flags, and words of the answer.
ROWS: dict[str, tuple[str, ...]] = {
    "unknown strategy": ("--strategy=mirorred", "--strategy=mirorred", 'Did you mean "mirrored"'),
    "unknown model": ("--model=cnm", "--model=cnm", 'Did you mean "cnn"'),
    "unknown data set": ("--dataset=digit", "--dataset=digit", 'Did you mean "digits"'),
    "unknown optimizer": ("--optimizer=adamm", "--optimizer=adamm", "adam"),
    "unknown argument": ("--optimizer=sgd(momentun=0.9)", "momentun", 'Did you mean "momentum"'),
    "unknown loss": ("--loss=mean_square_error", "--loss=mean_square_error", '"mean_squared_error"'),
    "unknown metric": ("--metrics=acuracy", "acuracy", 'Did you mean "accuracy"'),
    "unknown flag": ("--bach_size=8", "--bach_size", 'Did you mean "--batch_size"'),
    "no number": ("--batch_size=many", "--batch_size", "many"),
    "no TF_CONFIG": ("--strategy=multiworker", "TF_CONFIG", "Example:"),
    "TF_CONFIG no JSON": ("", "TF_CONFIG must be JSON", "Example:"),
    "TF_CONFIG no task": ("", "TF_CONFIG must have a `task`", "Example:"),
    "TF_CONFIG index": ("", "TF_CONFIG's task index must be in [0, 2)", "Received: 2"),
    "sources disagree": ("", "must agree", "TF_CONFIG", "Horovod"),
    "one process among two": ("--strategy=mirrored", "--strategy=mirrored", "--strategy=auto"),
    "fashion_mnist": ("--dataset=fashion_mnist", "fashion_mnist", "--data_dir"),
    "tfds": ("--dataset=tfds:mnist --data_dir=nothing", "tfds:mnist", "tfds build mnist"),
    "images": ("--dataset=images:nothing", "images", "there is no folder nothing"),
    "a table without label": ("--dataset=csv:own_of_test.py", "column of the label", "Add label="),
    "records without features": ("--dataset=tfrecord:own_of_test.py", "must be TFRecord files", "own_of_test.py"),
    "arrays": ("--dataset=npz:own_of_test.py", "must have arrays x and y", "own_of_test.py"),
    "unknown augmentation": ("--augment=crop|flipp", "--augment=flipp", 'Did you mean "flip"'),
    "augmentation of text": (
        "--augment=flip --dataset=text --model=transformer",
        "--augment changes images",
        "int32[128]",
    ),
    "model does not import": ("--model=broken_of_test:f", "broken_of_test", "a_package_that_nobody_has"),
    "model is not there": ("--model=own_of_test:rasing", "rasing", 'Did you mean "raising"'),
    "model raises": ("--model=own_of_test:raising", "--model=own_of_test:raising", "too few layers", "own_of_test.py"),
    "optimizer refuses": ("--optimizer=sgd(momentum=7)", "--optimizer=sgd(momentum=7)", "between [0, 1]"),
    "loss does not fit": ("--loss=mean_squared_error", "y int32[]", "--loss"),
    "metric does not fit": ("--metrics=auc", "y int32[]", "--metrics"),
    **{
        f"labels {data}": (f"--model=data_of_test:two --dataset=data_of_test:{data}", *words)
        for data, words in {
            "outside": ("Labels must be in 0..1", "y with 2 (2 of 8", "3 units"),
            "one_hot": ("y of shape [2]", "Use categorical_crossentropy"),
            "strings": ("Labels must be numbers", "strings", "StringLookup"),
            "mixed": ("NoneType and str", "Replace missing values"),
            "empty": ("The data is empty", "(0, 4), (0,)"),
        }.items()
    },
    "labels of another loss": (
        "--model=data_of_test:two --dataset=data_of_test:outside --loss=categorical_crossentropy(from_logits=True)",
        "y of shape []",
        "Use sparse_categorical_crossentropy",
    ),
    "output is a file": ("--output_dir=full/file.txt/run", "output directory", "full/file.txt"),
    "output is not empty": ("--output_dir=full", "output directory must be empty", "--output_dir"),
    "no TPU": ("--strategy=tpu", "--strategy=tpu", "--tpu=NAME"),
    "batch too small": ("--strategy=mirrored --devices=2 --batch_size=1", "--batch_size=1", "2 replicas"),
    "batch of one replica": (
        "--strategy=mirrored --devices=2 --batch_size=7 --elastic_batch=replica",
        "--batch_size=7",
        "2 replicas",
        "6 or 8",
        "--elastic_batch",
    ),
    "devices of single": ("--strategy=single --devices=2", "--devices=2", "--strategy=mirrored"),
    "too many CPU devices": ("--strategy=mirrored --devices=99", "at most 32 logical CPU", "99 devices"),
    **{
        name: (f"--strategy=mesh --mesh_shape={flags}", *words)
        for name, (flags, *words) in {
            "mesh has too many CPU devices": ("data:2000", "at most 32 logical CPU", "2000 devices", "tfdist layout"),
            "mesh has another grammar": ("data=4", "--mesh_shape", "'data=4'"),
            "mesh has other devices": ("data:4 --devices=2", "of size 4", "--devices=2"),
            "mesh has no such axis": ("data:4 --layout=out:modle", "The mesh data:4 has no axis modle"),
            "axis twice in a variable": (
                "data:2;model:2 --layout=in:model;out:model",
                "in and out of",
                "kernel on the axis model",
            ),
            "axis does not divide": (
                "data:1;model:4 --layout=out:model",
                "shards out of",
                "over the 4 devices of model",
                "out of 10",
            ),
            "convolution is split": (
                "data:2;model:2 --model=cnn --layout=out:model",
                "shards out of",
                "shard kernels of convolutions",
                "tfdist.name_dims",
            ),
            "mesh does not divide the batch": ("data:4 --batch_size=6", "--batch_size=6", "4 replicas", "4 or 8"),
            "axis without sharding": ("data:4 --shard_axis=data", "--shard_axis=data", "--shard=none"),
        }.items()
    },
    "commits nowhere": ("--commit_every=5", "--commit_every=5", "Add --commit_dir", "TFDIST_COMMITS"),
    "commits never": ("--commit_dir=full", "--commit_dir=full", "add --commit_every"),
    "steps and epochs": ("--epochs=2", "--steps=1", "--epochs=2"),
    "learning rate twice": (
        "--optimizer=sgd(learning_rate=0.1) --learning_rate=0.2",
        "--learning_rate=0.2",
        "leave out --learning_rate",
    ),
}
VARIABLES: dict[str, dict[str, str]] = {
    "TF_CONFIG no JSON": {"TF_CONFIG": "{worker"},
    "TF_CONFIG no task": {"TF_CONFIG": json.dumps(CLUSTER)},
    "TF_CONFIG index": {"TF_CONFIG": json.dumps({**CLUSTER, "task": {"type": "worker", "index": 2}})},
    "sources disagree": {"TF_CONFIG": TWO}
    | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
    "one process among two": {"TF_CONFIG": TWO},
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
    """Runs the command in a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.train", *QUICK, "--output_dir=run", *argv],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "row",
    [
        "unknown flag",
        "TF_CONFIG no JSON",
        pytest.param("no TPU", marks=pytest.mark.smoke("tpu")),
        "model raises",
        "batch too small",
    ],
)
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


@pytest.mark.processes
def test_the_coordinator_s_port_is_in_use() -> None:
    addresses = processes.free_addresses(2)
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        result = start((f"--coordinator={taken}",), {"TF_CONFIG": json.dumps(config)})
    assert_one_line(*result, (taken, "TFDIST_COORDINATOR"))


@pytest.mark.processes
def test_the_worker_s_own_port_is_in_use() -> None:
    argv = ("train", *QUICK, "--output_dir=run", "--strategy=multiworker")
    with processes.job([sys.executable, "-c", PORT_OF_RANK_1, *argv], 2) as job:
        ended = job.wait(300)
    assert ended[1].code == 2, ended[1].output
    [line] = [line for line in ended[1].output.splitlines() if line.startswith("tfdist train: ")]
    assert "free port" in line and "TF_CONFIG" in line, line
    assert ended[0].code == 5 and "rank 1" in ended[0].output, ended[0].output
