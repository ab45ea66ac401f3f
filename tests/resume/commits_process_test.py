"""Real processes that are killed between a commit and the next checkpoint, and what becomes of the run."""

import os
import pathlib
import shutil
import signal
import sys
import time

from tests.resume.command_test import shown, weights
from tfdist import ledger
from tfdist.checkpoint import newest, step_of
from tfdist.reporting import RunDirectory
from tfdist.testing import processes

SECONDS = 240.0
STEPS, DURABLE, COMMIT = 220, 100, 7
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
FLAGS = (
    "--model=tests.chaos.network:network",
    "--dataset=digits",
    "--batch_size=48",
    "--strategy=horovod",
    "--compression=topk(ratio=0.1)",
    "--compression_min_bytes=64",
    "--steps_per_call=7",
    "--log_every=20",
    "--measure_every=0",
    "--keep=2",
)


def train(path: pathlib.Path, steps: int = STEPS, every: int = DURABLE, *flags: str) -> list[str]:
    length = (f"--steps={steps}", f"--checkpoint_every={every}", f"--output_dir={path}")
    return [sys.executable, "-m", "tfdist.train", *FLAGS, *length, *flags]


def finish(command: list[str], size: int, environment: dict[str, str] | None = None) -> list[str]:
    """Runs the processes to their end; returns what each has printed."""
    with processes.job(command, size, THREADS | (environment or {})) as job:
        ended = job.wait(SECONDS)
    assert [end.code for end in ended] == [0] * size, "\n".join(end.output for end in ended)
    return [end.output for end in ended]


def last_commit(memory: pathlib.Path) -> int:
    return max((step_of(path) for folder in memory.iterdir() for path in newest(folder)), default=0)


def kill_behind_a_commit(job: processes.Job, memory: pathlib.Path) -> None:
    """Behind the first checkpoint, and before the second."""
    end = time.monotonic() + SECONDS
    while last_commit(memory) < DURABLE + COMMIT:
        assert time.monotonic() < end and all(p.poll() is None for p in job.processes), job.output(0)
        time.sleep(0.001)
    for process in job.processes:
        os.kill(process.pid, signal.SIGKILL)
    job.wait(SECONDS)


def test_processes_that_are_killed_go_on_from_the_last_commit(tmp_path: pathlib.Path) -> None:
    """As many processes end as if nobody was killed; more of them as those that take over a run that was stopped there."""
    whole, path, stopped, memory = (tmp_path / name for name in ("whole", "run", "stopped", "memory"))
    memory.mkdir()
    elastic = {"TFDIST_COMMITS": str(memory)}
    again = elastic | {"TFDIST_RESTART": "1"}
    command = train(path, STEPS, DURABLE, f"--commit_every={COMMIT}")
    finish(train(whole), 2)
    with processes.job(command, 2, THREADS | elastic) as job:
        kill_behind_a_commit(job, memory)
    step = last_commit(memory)
    assert DURABLE < step < 2 * DURABLE
    for origin in (path, memory):
        shutil.copytree(origin, tmp_path / "kept" / origin.name)

    finish(command, 2, again)
    assert [start["step"] for start in RunDirectory(path).beginnings()] == [0, step]
    assert weights(path) == weights(whole)
    assert shown(path) == shown(whole)
    assert ledger.main(str(path)) == 0
    assert last_commit(memory) == 0  # the last checkpoint has all

    for origin in (path, memory):
        shutil.rmtree(origin)
        shutil.copytree(tmp_path / "kept" / origin.name, origin)
    said = finish(command, 3, again)[0]
    assert "3 replicas go on where 2 stopped: what compression has not sent yet keeps its sum" in said
    assert [start["step"] for start in RunDirectory(path).beginnings()] == [0, step]
    assert ledger.main(str(path)) == 0
    finish(train(stopped, step, step), 2)
    finish(train(stopped), 3)
    assert weights(path) == weights(stopped)
