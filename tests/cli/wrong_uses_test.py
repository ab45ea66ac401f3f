"""Wrong uses as people make them, in a table: each is answered by one line that names the cause, with exit code 2.

`command` rows are answered without TensorFlow, and therefore at once; `training` rows need it. `program` rows are statements of
a program, whose `InputError` has the exit code.
"""

import csv
import json
import os
import pathlib
import re
import shlex
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.cli import wrong_uses_worker
from tests.user_commands import captured
from tfdist.errors import InputError

TABLE = pathlib.Path(__file__).with_name("wrong_uses.tsv")
FILES = {
    "empty/": "",
    "photos/readme.txt": "hello\n",
    "other/lightning_logs/version_0/metrics.csv": "epoch,loss\n",
    "data.csv": "length,width,species\n1.0,2.0,a\n1.5,2.5,b\n2.0,1.0,a\n",
    "other/keras.json": '{"backend": "jax"}',
    "slots": "node1.example.com:1\n",
    "notes.txt": "just some notes\n",
    "typo.yaml": "model: mlp\nbach_size: 3\n",
    "nested.yaml": "train:\n  model: mlp\n",
    "broken.yaml": "model: [mlp\n",
    "list.yaml": "- model\n- mlp\n",
    "word.yaml": "epochs: ten\n",
    "typo.flags": "--model=mlp\n--bach_size=3\n",
    "config.yaml": "model: mlp\n",
    "run.flags": "--model=mlp\n",
    "mine.py": "def build(input_shape, classes):\n    return None\n\n\ndef nothing():\n    pass\n\n\nVALUE = 3\n",
    "custom.py": "import keras\n\n\nclass Own(keras.Model):\n    def call(self, x):\n        return x\n\n\n"
    "def build(input_shape, classes):\n    return Own()\n",
    "broken.py": "import keras\nprint(\n",
    "note.ipynb": '{"cells": []}\n',
    "model.keras": "PK",
}
VARIABLES = re.compile(
    r"TF_CONFIG|TFDIST_|HOROVOD_|OMPI_|PMI_|SLURM_|(LOCAL_)?RANK$|WORLD_SIZE$|MASTER_|JOB_COMPLETION_INDEX$"
)


def rows(kind):
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row["kind"] == kind]


def parsed(use):
    """Returns the variables and the arguments of a command line."""
    words = shlex.split(use)
    command = words.index("tfdist")
    return dict(word.split("=", 1) for word in words[:command]), words[command + 1 :]


def check(row, code, out, err, directory):
    assert (str(code), out) == (row["exit code"], ""), (row["use"], err)
    [line] = [each for each in err.splitlines() if " INFO rank 0: Using strategy " not in each] or [""]
    message = row["message"].replace("{directory}", str(directory))
    is_part = message.endswith(" ...")
    assert line.startswith(message.removesuffix(" ...")) if is_part else line == message, (row["use"], line)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with a user's files, as the current one, and no variables of launchers."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in filter(VARIABLES.match, [*os.environ]):
        monkeypatch.delenv(name)
    yield tmp_path
    for name in ("mine", "custom"):
        sys.modules.pop(name, None)


def test_there_are_100_wrong_uses_and_each_is_there_once():
    uses = [row["use"] for kind in ("command", "training", "program") for row in rows(kind)]
    assert len(uses) == len(set(uses)) >= 100


def test_commands_are_answered_without_tensorflow(directory):
    wrong = rows("command")
    uses = json.dumps([parsed(row["use"]) for row in wrong])
    own = {**os.environ, "PYTHONPATH": str(pathlib.Path(tfdist.__file__).parents[1])}
    done = captured([sys.executable, wrong_uses_worker.__file__], stdin=None, input=uses, env=own)
    assert done.returncode == 0, done.stderr
    for row, (code, out, err, modules) in zip(wrong, json.loads(done.stdout), strict=True):
        check(row, code, out, err, directory)
        assert not modules, row["use"]
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["empty", "other", "photos"]


@pytest.mark.parametrize("row", rows("training"), ids=lambda row: row["use"].removeprefix("tfdist train "))
def test_training(row, directory, capfd):
    code, _, _, _ = found = wrong_uses_worker.run(*parsed(row["use"]))
    assert code is not None
    out, err = capfd.readouterr()
    check(row, code, found[1] + out, found[2] + err, directory)


@pytest.fixture(scope="module")
def names(single):
    """What the statements of programs use."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = np.random.default_rng(0).random((32, 4), np.float32), np.arange(32) % 3

    def model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    def trainer(strategy=single, **options):
        with strategy.scope():
            return tfdist.Trainer(model(), **{"optimizer": "sgd", "loss": loss, **options})

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    return {"np": np, "keras": keras, "tf": tf, "tfdist": tfdist, "X": x, "Y": y, "DATA": data} | {
        "model": model,
        "trainer": trainer,
        "pipelined": lambda **options: trainer(tfdist.load_strategy("pipeline", environment={}), **options),
    }


@pytest.mark.parametrize("row", rows("program"), ids=lambda row: row["use"])
def test_programs(row, names, directory):
    with pytest.raises(InputError) as caught:
        exec(row["use"], dict(names))
    check(row, int(caught.value.exit_code), "", str(caught.value), directory)


@pytest.mark.processes
@pytest.mark.parametrize("row", rows("command")[::40], ids=lambda row: row["use"])
def test_as_a_process(row, directory):
    environment, arguments = parsed(row["use"])
    done = captured([sys.executable, "-m", "tfdist", *arguments], env={**os.environ, **environment})
    check(row, done.returncode, done.stdout, done.stderr, directory)
