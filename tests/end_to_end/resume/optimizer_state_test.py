"""Runs whose processes have parts of the optimizer's state resume with others: of stages, and of a sharded optimizer."""

import pathlib
import sys

import numpy as np
import pytest
from absl import flags as absl_flags

from tests import processes
from tests.end_to_end.resume.command_test import shown, weights
from tfdist import ledger
from tfdist import train as train_command
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.cli import flags as train_flags

pytestmark = pytest.mark.processes

SHARDED = "--shard=optimizer"
PIPELINE = ("--strategy=pipeline", "--mesh_shape=stage:2;data:2", "--micro_batches=2")
FLAGS = (
    "--model=mlp(hidden=(32, 24, 16, 8))",
    "--dataset=digits",
    "--batch_size=48",
    "--optimizer=adamw",
    "--ema=0.9",
    "--clip_norm=1",
    "--checkpoint_every=15",
    "--steps_per_call=5",
    "--log_every=5",
    "--measure_every=0",
)


def train(path: pathlib.Path, size: int, launcher: str, steps: int, *flags: str) -> str:
    launch = [f"--processes={size}", f"--launcher={launcher}", f"--log_dir={path}-logs", "--", sys.executable]
    own = [f"--steps={steps}", f"--output_dir={path}", *flags]
    return run("tfdist.launch", *launch, "-m", "tfdist.train", *FLAGS, *own)


def run(module: str, *arguments: str) -> str:
    [output] = processes.finish([sys.executable, "-m", module, *arguments])
    assert "retracing" not in output, output
    return output


def train_alone(path: pathlib.Path, steps: int, *flags: str) -> None:
    values = absl_flags.FlagValues()
    train_flags.define(values)
    values(["train", *FLAGS, *flags, "--strategy=single", f"--steps={steps}", f"--output_dir={path}"])
    assert train_command.main(train_flags.config(values)) == 0


def check_close(path: pathlib.Path, other: pathlib.Path) -> None:
    """Asserts that the newest checkpoints of two runs have the same variables, up to rounding in float32."""
    one, two = (Checkpoint.open(complete_checkpoints(each / "checkpoints")[0]) for each in (path, other))
    assert one.tensors.keys() == two.tensors.keys() and one.step == two.step
    for name in one.tensors:
        found, wanted = (np.asarray(each.read(name), np.float64) for each in (one, two))
        assert np.linalg.norm(found - wanted) <= 1e-4 * np.linalg.norm(wanted) + 1e-6, name


@pytest.mark.parametrize(
    ("launcher", "other"), [("tensorflow", "horovod"), pytest.param("horovod", "tensorflow", marks=pytest.mark.full)]
)
def test_stages_resume_on_another_number_of_processes_and_without_shards(
    launcher: str, other: str, tmp_path: pathlib.Path
) -> None:
    path, whole = tmp_path / "run", tmp_path / "whole"
    output = train(path, 4, launcher, 15, *PIPELINE, SHARDED)
    assert "state sharded over 2 replicas, " in output
    strategy = "--strategy=horovod" if other == "horovod" else "--strategy=multiworker"
    assert "state sharded over 2 replicas, " in train(path, 2, other, 30, strategy, SHARDED)
    train_alone(path, 45)
    train_alone(whole, 45)
    check_close(path, whole)
    assert ledger.main(str(path)) == 0


def test_stages_have_the_factors_of_one_device(tmp_path: pathlib.Path) -> None:
    """Adafactor's are named after kernels and biases, without their layers: each stage would have the same names."""
    path, whole = tmp_path / "run", tmp_path / "whole"
    flags = ("--optimizer=adafactor", "--model=mlp(hidden=(8, 8))")
    train_alone(path, 15, *flags)
    train(path, 2, "tensorflow", 30, "--strategy=pipeline", "--micro_batches=2", *flags)
    train_alone(path, 45, *flags)
    train_alone(whole, 45, *flags)
    check_close(path, whole)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["tensorflow", "horovod"])
def test_stages_with_a_sharded_optimizer_are_those_with_a_whole_one(launcher: str, tmp_path: pathlib.Path) -> None:
    paths = {flag: tmp_path / flag.strip("-") for flag in (SHARDED, "--shard=none")}
    for flag, path in paths.items():
        train(path, 4, launcher, 30, *PIPELINE, flag)
    assert weights(paths[SHARDED]) == weights(paths["--shard=none"])
    assert shown(paths[SHARDED]) == shown(paths["--shard=none"])
    again = tmp_path / "again"
    train(again, 4, launcher, 15, *PIPELINE, SHARDED)
    train(again, 4, launcher, 30, *PIPELINE, SHARDED)
    assert weights(again) == weights(paths[SHARDED])
