"""Resuming a run whose real processes were killed between an in-memory checkpoint (commit) and the next durable one."""

import dataclasses
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


def kill_behind_a_commit(job: processes.Job, home: pathlib.Path) -> None:
    """Kills the processes at a commit after the first durable checkpoint."""
    end = time.monotonic() + SECONDS
    while min(map(last_commit, home.glob("memory*"))) < DURABLE + COMMIT:
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


@dataclasses.dataclass(frozen=True)
class Killed:
    """The files of a killed run of two processes, which can be resumed repeatedly at the same path."""

    home: pathlib.Path
    memory: str  # directory in it, of a rank's host
    flags: tuple[str, ...]

    @classmethod
    def run(cls, home: pathlib.Path, memory: str, *flags: str) -> "Killed":
        """Runs the processes, kills them before the second durable checkpoint, and keeps the files."""
        run, memories = cls(home, memory, flags), {memory.format(rank=rank) for rank in range(2)}
        for _ in range(5):  # it may be killed too late
            for left in ("run", *memories):
                shutil.rmtree(home / left, ignore_errors=True)
            for made in memories:
                (home / made).mkdir()
            with processes.job(run.command, 2, run.environment) as job:
                kill_behind_a_commit(job, home)
                output = job.output(0)
            if DURABLE < max(map(last_commit, home.glob("memory*")), default=0) < 2 * DURABLE:
                break
        else:
            raise AssertionError(output)
        (home / "kept").mkdir()
        for left in ("run", *memories):
            (home / left).rename(home / "kept" / left)
        return run

    @property
    def path(self) -> pathlib.Path:
        return self.home / "run"

    @property
    def command(self) -> list[str]:
        return train(self.path, STEPS, DURABLE, f"--commit_every={COMMIT}", *self.flags)

    @property
    def environment(self) -> dict[str, str]:
        return processes.ONE_THREAD | {"TFDIST_COMMITS": str(self.home / self.memory)}

    def go_on(self, size: int, lost: int | None = None) -> tuple[int, str]:
        """Resumes the run, without the memory of a lost rank's host; returns the step, and the chief's output."""
        for kept in (self.home / "kept").iterdir():
            shutil.rmtree(self.home / kept.name, ignore_errors=True)
            shutil.copytree(kept, self.home / kept.name)
        if lost is not None:
            shutil.rmtree(self.home / self.memory.format(rank=lost))
        # If killed during the last stage of a write, the remaining host may be one commit ahead of the other, or behind it.
        last = max(map(last_commit, self.home.glob("memory*")))
        said = processes.finish(self.command, size, self.environment)[0]
        assert [start["step"] for start in RunDirectory(self.path).read_starts()] == [0, last]
        assert ledger.main(str(self.path)) == 0
        assert {last_commit(memory) for memory in self.home.glob("memory*")} == {0}  # removed at the end
        return last, said


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return Killed.run(tmp_path_factory.mktemp("killed"), "memory")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("runs") / "uninterrupted"
    finish(train(path), 2)
    return path


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_host_is_lost_with_its_memory(lost: int, uninterrupted: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Each process has its own directory, as on two hosts; the other host has a copy of the lost one's data."""
    killed = Killed.run(tmp_path, "memory-{rank}")
    killed.go_on(2, lost)
    assert weights(killed.path) == weights(uninterrupted)
    assert shown(killed.path) == shown(uninterrupted)


@pytest.mark.full
def test_the_host_that_is_left_goes_on_alone(tmp_path: pathlib.Path) -> None:
    step, said = Killed.run(tmp_path, "memory-{rank}").go_on(1, lost=1)
    finish(train(tmp_path / "purpose", step, step), 2)
    finish(train(tmp_path / "purpose"), 1)
    assert "1 replicas resume a run of 2: residuals of compression keep their sum" in said
    assert weights(tmp_path / "run") == weights(tmp_path / "purpose")


@pytest.mark.full
def test_more_processes_end_as_those_that_take_over_a_run_that_was_stopped_there(
    killed: Killed, tmp_path: pathlib.Path
) -> None:
    step, said = killed.go_on(3)
    assert "3 replicas resume a run of 2: residuals of compression keep their sum" in said
    finish(train(tmp_path, step, step), 2)
    finish(train(tmp_path), 3)
    assert weights(killed.path) == weights(tmp_path)
