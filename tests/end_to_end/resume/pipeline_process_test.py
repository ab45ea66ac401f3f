"""Pipelines that are preempted or lose a stage: they save, name it, and resume bit for bit."""

import os
import pathlib
import signal
import sys

import pytest

from tests import processes
from tests.end_to_end.chaos.striking import child_of_rank
from tests.end_to_end.resume.command_test import shown, weights
from tfdist import ledger
from tfdist.checkpoint.format import newest, step_of

pytestmark = pytest.mark.processes

SECONDS = 300.0
STEPS, EVERY = 300, 50
LAUNCH = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--restart_backoff_seconds=0.1"]
FLAGS = (
    "--strategy=pipeline",
    "--micro_batches=2",
    "--activation_compression=int8",
    "--model=tests.end_to_end.chaos.network:network",  # local BatchNorm, and dropout
    "--dataset=digits",
    "--batch_size=48",
    "--log_every=50",
    "--steps_per_call=10",
    "--eval_every=1000",
    "--measure_every=0",
    f"--steps={STEPS}",
    f"--checkpoint_every={EVERY}",
)


def command(path: pathlib.Path, *launch: str, flags: tuple[str, ...] = FLAGS) -> list[str]:
    train = [sys.executable, "-m", "tfdist.train", *flags, f"--output_dir={path}"]
    return [*LAUNCH, f"--log_dir={path.parent / 'logs'}", *launch, "--", *train]


def preempted(given: list[str], step: int) -> str:
    """Preempts a command behind a step; returns what it says."""
    with processes.job(given, 1) as job:
        job.wait_for(0, f"step {step}/", SECONDS)
        job.processes[0].send_signal(signal.SIGTERM)
        [end] = job.wait(SECONDS)
    assert end.code == 75, end.output
    return end.output


def finished_without_a_stage(given: list[str]) -> str:
    """Kills rank 1 of a command behind step 100; returns what the command, which restarts it, says until its end."""
    with processes.job(given, 1) as job:
        job.wait_for(0, "step 100/", SECONDS)
        victim = child_of_rank(job.processes[0].pid, 1)
        assert victim, job.output(0)
        os.kill(victim, signal.SIGKILL)
        [end] = job.wait(SECONDS)
    assert end.code == 0, end.output
    assert "rank 1 ended with code 137 (killed by SIGKILL)" in end.output, end.output
    return end.output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An uninterrupted run."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    processes.finish(command(path))
    return path


def check_is_whole(path: pathlib.Path, whole: pathlib.Path) -> None:
    """Asserts that weights, slots, statistics and records are those of the uninterrupted run, bit for bit."""
    assert weights(path) == weights(whole)
    assert shown(path) == shown(whole)
    assert ledger.main(str(path)) == 0


def test_one_that_is_preempted_saves_and_goes_on(whole, tmp_path) -> None:
    output = preempted(command(tmp_path / "run"), 100)
    assert "all ranks ended with code 75 (preempted)." in output
    assert 100 <= step_of(newest(tmp_path / "run" / "checkpoints")[0]) < STEPS
    processes.finish(command(tmp_path / "run"))
    check_is_whole(tmp_path / "run", whole)


def test_a_stage_that_is_killed_is_named_and_the_run_restarts(whole, tmp_path) -> None:
    output = finished_without_a_stage(command(tmp_path / "run", "--max_restarts=1"))
    assert "rank 0 of 2: rank 1 (stage 1) is lost: " in output, output
    check_is_whole(tmp_path / "run", whole)
