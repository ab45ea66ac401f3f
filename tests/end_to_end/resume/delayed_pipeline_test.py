"""A pipeline without a flush resumes bit for bit: batches that have begun are not saved, but computed again."""

import os
import pathlib
import signal
import sys

import pytest

from tests import processes
from tests.end_to_end.chaos.striking import child_of_rank
from tests.end_to_end.resume.command_test import shown, weights
from tests.end_to_end.resume.pipeline_process_test import LAUNCH, SECONDS
from tfdist import ledger

pytestmark = pytest.mark.processes

FLAGS = [
    "--strategy=pipeline",
    "--pipeline_schedule=pipedream",
    "--model=tests.end_to_end.chaos.network:network",  # local BatchNorm, and dropout
    "--dataset=digits",
    "--batch_size=48",
    "--log_every=20",
    "--measure_every=0",
]


PARTS = ["--steps=200", "--steps_per_call=4", "--eval_every=40", "--checkpoint_every=50"]


def command(path: pathlib.Path, *more: str, launch: tuple[str, ...] = ()) -> list[str]:
    train = [sys.executable, "-m", "tfdist.train", *FLAGS, f"--output_dir={path}", *more]
    return [*LAUNCH, f"--log_dir={path.parent / 'logs'}", *launch, "--", *train]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run that is never saved or evaluated before its end."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    flags = ["--steps=200", "--steps_per_call=10", "--eval_every=1000"]
    with processes.job(command(path, *flags, "--checkpoint_every=200"), 1) as job:
        [end] = job.wait(SECONDS)
    assert end.code == 0, end.output
    return path


def check_is_whole(path: pathlib.Path, whole: pathlib.Path) -> None:
    """Asserts that weights, their older versions, slots, statistics and records are equal, bit for bit."""
    assert any(name.startswith("delayed/") or "/delayed/" in name for name in weights(whole))
    assert weights(path) == weights(whole)
    assert [x for x in shown(path) if x[0] == "train"] == [x for x in shown(whole) if x[0] == "train"]
    assert ledger.main(str(path)) == 0


def test_a_preempted_run_ends_as_one_that_is_never_saved_or_evaluated(
    whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    parts = tmp_path / "parts"
    with processes.job(command(parts, *PARTS), 1) as job:
        job.wait_for(0, "step 60/", SECONDS)
        job.processes[0].send_signal(signal.SIGTERM)
        [end] = job.wait(SECONDS)
    assert end.code == 75, end.output
    with processes.job(command(parts, *PARTS), 1) as job:
        [end] = job.wait(SECONDS)
    assert end.code == 0, end.output
    check_is_whole(parts, whole)


@pytest.mark.full
def test_so_does_one_that_loses_a_stage_and_is_restarted(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    parts = tmp_path / "parts"
    with processes.job(command(parts, *PARTS, launch=("--max_restarts=1",)), 1) as job:
        job.wait_for(0, "step 100/", SECONDS)
        victim = child_of_rank(job.processes[0].pid, 1)
        assert victim, job.output(0)
        os.kill(victim, signal.SIGKILL)
        [end] = job.wait(SECONDS)
    assert end.code == 0, end.output
    assert "rank 1 ended with code 137 (killed by SIGKILL)" in end.output, end.output
    check_is_whole(parts, whole)
