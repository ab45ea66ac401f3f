"""Pipelines that are preempted or lose a stage: they save, name it, and resume bit for bit, with and without a flush.

Without a flush, batches that have begun are not saved, but computed again.
"""

import functools
import os
import pathlib
import signal
import sys
from collections.abc import Callable

import pytest

from tests import processes
from tests.end_to_end.chaos.striking import child_of_rank
from tests.end_to_end.resume.command_test import shown, weights
from tests.selection import quick
from tfdist import ledger
from tfdist.checkpoint.format import complete_checkpoints, step_of

pytestmark = pytest.mark.processes

SECONDS = 300.0
LAUNCH = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--restart_backoff_seconds=0.1"]
FLAGS = (
    "--strategy=pipeline",
    "--model=tests.end_to_end.chaos.network:network",  # local BatchNorm, and dropout
    "--dataset=digits",
    "--batch_size=48",
    "--measure_every=0",
)
FLUSHED = (
    "--micro_batches=2",
    "--activation_compression=int8",
    "--log_every=50",
    "--steps=300",
    "--checkpoint_every=50",
)
FLUSHED += ("--steps_per_call=10", "--eval_every=1000")
DELAYED = ("--pipeline_schedule=pipedream", "--log_every=20", "--steps=200")
# By schedule: flags of a run, and those of the whole, which without a flush is never saved or evaluated before its end.
SCHEDULES = {
    "flushed": (FLUSHED, FLUSHED),
    "delayed": (
        (*DELAYED, "--steps_per_call=4", "--eval_every=40", "--checkpoint_every=50"),
        (*DELAYED, "--steps_per_call=10", "--eval_every=1000", "--checkpoint_every=200"),
    ),
}


def command(path: pathlib.Path, flags: tuple[str, ...], *launch: str) -> list[str]:
    train = [sys.executable, "-m", "tfdist.train", *FLAGS, *flags, f"--output_dir={path}"]
    return [*LAUNCH, f"--log_dir={path.parent / 'logs'}", *launch, "--", *train]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Returns a function that makes the uninterrupted run of a schedule, once."""

    @functools.cache
    def whole(schedule: str) -> pathlib.Path:
        path = tmp_path_factory.mktemp("runs") / "whole"
        processes.finish(command(path, SCHEDULES[schedule][1]))
        return path

    return whole


def check_is_whole(path: pathlib.Path, whole: pathlib.Path, schedule: str) -> None:
    """Asserts that weights, their older versions, slots, statistics and records are equal, bit for bit."""
    assert any("delayed/" in name for name in weights(whole)) == (schedule == "delayed")
    assert weights(path) == weights(whole)
    kinds = ("train",) if schedule == "delayed" else ("train", "eval")
    found, wanted = ([record for record in shown(each) if record[0] in kinds] for each in (path, whole))
    assert found == wanted
    assert ledger.main(str(path)) == 0


@pytest.mark.parametrize(("schedule", "step", "steps"), [("flushed", 100, 300), ("delayed", 60, 200)])
def test_one_that_is_preempted_saves_and_goes_on(schedule, step, steps, wholes, tmp_path) -> None:
    parts = command(tmp_path / "run", SCHEDULES[schedule][0])
    with processes.job(parts, 1) as job:
        job.wait_for(0, f"step {step}/", SECONDS)
        job.processes[0].send_signal(signal.SIGTERM)
        [end] = job.wait(SECONDS)
    assert end.code == 75, end.output
    assert "all ranks ended with code 75 (preempted)." in end.output
    assert step <= step_of(complete_checkpoints(tmp_path / "run" / "checkpoints")[0]) < steps
    processes.finish(parts)
    check_is_whole(tmp_path / "run", wholes(schedule), schedule)


@pytest.mark.parametrize("schedule", quick(SCHEDULES, "flushed"))
def test_a_stage_that_is_killed_is_named_and_the_run_restarts(schedule, wholes, tmp_path) -> None:
    with processes.job(command(tmp_path / "run", SCHEDULES[schedule][0], "--max_restarts=1"), 1) as job:
        job.wait_for(0, "step 100/", SECONDS)
        victim = child_of_rank(job.processes[0].pid, 1)
        assert victim, job.output(0)
        os.kill(victim, signal.SIGKILL)
        [end] = job.wait(SECONDS)
    assert end.code == 0, end.output
    assert "rank 1 ended with code 137 (killed by SIGKILL)" in end.output, end.output
    assert "rank 0 of 2: rank 1 (stage 1) is lost: " in end.output, end.output
    check_is_whole(tmp_path / "run", wholes(schedule), schedule)
