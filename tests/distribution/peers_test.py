"""Processes that are not peers train different models, like the stages of a pipeline."""

import pathlib
import subprocess
import sys

import pytest

from tfdist.checkpoint.format import Checkpoint, newest

pytestmark = pytest.mark.processes

PROGRAM = '''
import keras

import tfdist
from tfdist.distribution.strategy import VariableBlocks
from tfdist.strategies.single import Single


class Blocks(VariableBlocks):
    def saved_blocks(self, variable, per_replica, copied=True):
        values = variable.numpy()  # numbers, as the step, are those of both
        return [((0,) * values.ndim, values)] if self._strategy.is_chief or values.ndim else []


class Apart(Single):
    """Each process trains a model of its own, and saves it."""

    def __init__(self, *, cluster, join):
        super().__init__(cluster=cluster, join=join)
        self.name = "apart"
        self.peers = self.group.subgroup([cluster.rank])

    @property
    def blocks(self):
        return Blocks(self)


def network(input_shape, classes):
    rank = tfdist.current_strategy().cluster.rank
    width, name = [(8, "first"), (16, "second")][rank]
    hidden = keras.layers.Dense(width, "relu", name=f"{name}_hidden")
    layers = [keras.Input(input_shape), keras.layers.Flatten(), hidden]
    return keras.Sequential([*layers, keras.layers.Dense(classes, name=f"{name}_logits")])
'''


def test_processes_with_peers_of_their_own_train_models_of_their_own(tmp_path: pathlib.Path):
    (tmp_path / "apart.py").write_text(PROGRAM)
    flags = ["--strategy=apart:Apart", "--model=apart:network", "--dataset=digits", "--batch_size=16", "--steps=6"]
    flags += ["--optimizer=sgd(momentum=0.9)", "--checkpoint_every=3", "--check_sync_every=2", "--output_dir=run"]
    command = ["-m", "tfdist.launch", "--processes=2", sys.executable, "-m", "tfdist.train", *flags]
    ended = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, timeout=300, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checkpoint = Checkpoint.open(newest(tmp_path / "run" / "checkpoints")[0])
    assert checkpoint.step == 6
    assert {
        name.split("/")[-2]: entry.shape
        for name, entry in checkpoint.tensors.items()
        if name.startswith("model/") and name.endswith("/kernel")
    } == {"first_hidden": (64, 8), "first_logits": (8, 10), "second_hidden": (64, 16), "second_logits": (16, 10)}
