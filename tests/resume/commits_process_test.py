"""Real processes that are killed between a commit and the next checkpoint, and what becomes of the run."""

import dataclasses
import os
import pathlib
import shutil
import signal
import sys
import time

import pytest

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
    "--eval_every=1000",
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


@dataclasses.dataclass(frozen=True)
class Killed:
    """What a run of two processes has left, to be gone on with again and again in the same place."""

    home: pathlib.Path
    step: int  # of its last commit

    @property
    def path(self) -> pathlib.Path:
        return self.home / "run"

    def go_on(self, size: int) -> str:
        """Starts the run again as it was left, as a launcher does; returns what the chief has printed."""
        for name in ("run", "memory"):
            shutil.rmtree(self.home / name, ignore_errors=True)
            shutil.copytree(self.home / "kept" / name, self.home / name)
        again = {"TFDIST_COMMITS": str(self.home / "memory"), "TFDIST_RESTART": "1"}
        said = finish(train(self.path, STEPS, DURABLE, f"--commit_every={COMMIT}"), size, again)[0]
        assert [start["step"] for start in RunDirectory(self.path).beginnings()] == [0, self.step]
        assert ledger.main(str(self.path)) == 0
        assert last_commit(self.home / "memory") == 0  # the last checkpoint has all
        return said


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    home = tmp_path_factory.mktemp("killed")
    memory = home / "memory"
    memory.mkdir()
    command = train(home / "run", STEPS, DURABLE, f"--commit_every={COMMIT}")
    with processes.job(command, 2, THREADS | {"TFDIST_COMMITS": str(memory)}) as job:
        kill_behind_a_commit(job, memory)
    step = last_commit(memory)
    assert DURABLE < step < 2 * DURABLE
    (home / "kept").mkdir()
    for name in ("run", "memory"):
        (home / name).rename(home / "kept" / name)
    return Killed(home, step)


def test_as_many_processes_end_as_if_nobody_was_killed(killed: Killed, tmp_path: pathlib.Path) -> None:
    finish(train(tmp_path), 2)
    killed.go_on(2)
    assert weights(killed.path) == weights(tmp_path)
    assert shown(killed.path) == shown(tmp_path)


@pytest.mark.full
def test_more_processes_end_as_those_that_take_over_a_run_that_was_stopped_there(
    killed: Killed, tmp_path: pathlib.Path
) -> None:
    said = killed.go_on(3)
    assert "3 replicas go on where 2 stopped: what compression has not sent yet keeps its sum" in said
    finish(train(tmp_path, killed.step, killed.step), 2)
    finish(train(tmp_path), 3)
    assert weights(killed.path) == weights(tmp_path)
