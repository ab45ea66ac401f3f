"""A pipeline without a flush resumes bit for bit: batches that have begun are not saved, but computed again."""

import pathlib
import signal
import sys

import pytest

from tests import processes
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


def command(path: pathlib.Path, *more: str) -> list[str]:
    train = [sys.executable, "-m", "tfdist.train", *FLAGS, f"--output_dir={path}", *more]
    return [*LAUNCH, f"--log_dir={path.parent / 'logs'}", "--", *train]


def test_a_preempted_run_ends_as_one_that_is_never_saved_or_evaluated(tmp_path: pathlib.Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--steps=200", "--steps_per_call=10", "--eval_every=1000"]
    with processes.job(command(whole, *flags, "--checkpoint_every=200"), 1) as job:
        [end] = job.wait(SECONDS)
    assert end.code == 0, end.output
    flags = ["--steps=200", "--steps_per_call=4", "--eval_every=40", "--checkpoint_every=50"]
    with processes.job(command(parts, *flags), 1) as job:
        job.wait_for(0, "step 60/", SECONDS)
        job.processes[0].send_signal(signal.SIGTERM)
        [end] = job.wait(SECONDS)
    assert end.code == 75, end.output
    with processes.job(command(parts, *flags), 1) as job:
        [end] = job.wait(SECONDS)
    assert end.code == 0, end.output
    assert any(name.startswith("delayed/") or "/delayed/" in name for name in weights(whole))
    assert weights(parts) == weights(whole)
    assert [x for x in shown(parts) if x[0] == "train"] == [x for x in shown(whole) if x[0] == "train"]
    assert ledger.main(str(parts)) == 0
