"""Resuming a run whose real processes were killed between an in-memory checkpoint (commit) and the next durable one."""

import functools
import os
import pathlib
import shutil
import signal
import sys
import time

import pytest

from tests import processes
from tests.end_to_end.resume.command_test import shown, weights
from tfdist import ledger
from tfdist.checkpoint.format import step_of
from tfdist.reporting import RunDirectory

pytestmark = pytest.mark.processes

SECONDS = 300.0
STEPS, DURABLE, COMMIT = 220, 100, 7
FLAGS = (
    "--model=tests.end_to_end.chaos.network:network --dataset=digits --batch_size=48 --strategy=horovod --keep=2"
    " --compression=topk(ratio=0.1) --compression_min_bytes=64 --steps_per_call=7 --log_every=20 --measure_every=0"
    " --eval_every=1000"
).split()


def train(path: pathlib.Path, steps: int = STEPS, every: int = DURABLE, *flags: str) -> list[str]:
    length = (f"--steps={steps}", f"--checkpoint_every={every}", f"--output_dir={path}")
    return [sys.executable, "-m", "tfdist.train", *FLAGS, *length, *flags]


finish = functools.partial(processes.finish, environment=processes.ONE_THREAD)


def last_commit(memory: pathlib.Path) -> int:
    return max((step_of(path) for path in memory.glob("*/step-*")), default=0)


def kill_behind_a_commit(job: processes.Job, memories: list[pathlib.Path]) -> None:
    """Kills the processes at a commit after the first durable checkpoint."""
    end = time.monotonic() + SECONDS
    while min(map(last_commit, memories)) < DURABLE + COMMIT:
        assert time.monotonic() < end, job.output(0)
        codes = [process.poll() for process in job.processes]
        if 0 in codes:
            break  # they were faster than this process
        assert not any(codes), job.output(0)
        time.sleep(0.001)
    for process in job.processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    job.wait(SECONDS)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_host_is_lost_with_its_memory(lost: int, tmp_path: pathlib.Path) -> None:
    """Each process has its own directory, as on two hosts; the other host has a copy of the lost one's data."""
    path, memories = tmp_path / "run", [tmp_path / f"memory-{rank}" for rank in range(2)]
    command = train(path, STEPS, DURABLE, f"--commit_every={COMMIT}")
    environment = processes.ONE_THREAD | {"TFDIST_COMMITS": str(tmp_path / "memory-{rank}")}
    for _ in range(5):  # it may be killed too late
        for folder in (path, *memories):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        with processes.job(command, 2, environment) as job:
            kill_behind_a_commit(job, memories)
            output = job.output(0)
        if DURABLE < max(map(last_commit, memories)) < 2 * DURABLE:
            break
    else:
        raise AssertionError(output)
    shutil.rmtree(memories[lost])
    last = last_commit(memories[1 - lost])  # one commit ahead of the other, or behind it, if killed during a write
    processes.finish(command, 2, environment)
    assert [start["step"] for start in RunDirectory(path).read_starts()] == [0, last]
    assert ledger.main(str(path)) == 0
    assert {last_commit(memory) for memory in memories} == {0}  # removed at the end
    whole = tmp_path / "whole"
    finish(train(whole), 2)
    assert weights(path) == weights(whole)
    assert shown(path) == shown(whole)
