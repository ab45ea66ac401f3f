"""Elastic runs of real processes: one is killed and another one joins, and the end is that of a run resized on purpose."""

import contextlib
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable, Sequence

import pytest

from tests.chaos.ending import ending
from tests.chaos.settings import SAVED_EVERY, SETTINGS, Setting
from tests.chaos.striking import child_of_rank
from tests.chaos.watching import Watch
from tfdist.testing import processes

pytestmark = pytest.mark.alone

THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
DEADLINE_SECONDS = 120.0
KILLED_BEHIND, GROWN_BEHIND = 35, 63  # checkpoints that are there by then; epochs are of 29.9 steps
COMMIT_EVERY = 5
STEPS = 600  # so that there are seconds of them behind the last one, as the host list is read once a second
HOROVOD = SETTINGS["horovod3"]
MULTIWORKER = Setting("multiworker3", 3, "tensorflow", SETTINGS["multiworker2"].flags)


class Run:
    """One run's directory, and its launcher."""

    def __init__(self, setting: Setting, directory: pathlib.Path):
        self.setting, self.directory = setting, directory
        self.hosts = directory.parent / "hosts"
        self.offer(3)

    def offer(self, slots: int) -> None:
        """Writes the host list, at once."""
        new = self.hosts.with_suffix(".new")
        new.write_text(f"localhost:{slots}\n")
        new.replace(self.hosts)

    def launch(self, size: str, *flags: str, train: Sequence[str]) -> contextlib.AbstractContextManager:
        command = self.setting.launch(self.directory)
        there = command.index("--")
        own = [flag for flag in command[:there] if not flag.startswith("--processes")]
        return processes.job([*own, f"--processes={size}", *flags, *command[there:], *train], 1, THREADS)

    def starts(self) -> list[tuple[int, int]]:
        """The step and the number of replicas of each start."""
        path = self.directory / "starts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(start["step"], start["replicas"]) for start in map(json.loads, lines)]


def wait(condition: Callable[[], object], job: processes.Job) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end and job.processes[0].poll() is None, job.output(0)
        time.sleep(0.002)


@pytest.mark.parametrize(
    "setting", [HOROVOD, pytest.param(MULTIWORKER, marks=pytest.mark.full)], ids=lambda setting: setting.name
)
def test_a_killed_process_is_done_without_and_another_joins(setting: Setting, tmp_path: pathlib.Path) -> None:
    run = Run(setting, tmp_path / "run")
    watch = Watch(run.directory)
    elastic = (f"--hosts={run.hosts}", "--rejoin_seconds=inf")
    with run.launch("2:3", *elastic, train=(f"--steps={STEPS}", f"--commit_every={COMMIT_EVERY}")) as job:
        wait(lambda: watch.saved >= KILLED_BEHIND, job)
        os.kill(child_of_rank(job.processes[0].pid, 2) or 0, signal.SIGKILL)
        wait(lambda: watch.saved >= GROWN_BEHIND and len(run.starts()) == 2, job)
        run.offer(4)
        [end] = job.wait(DEADLINE_SECONDS)
        assert end.code == 0, end.output
    starts = run.starts()
    assert [replicas for _, replicas in starts] == [3, 2, 3], end.output
    assert KILLED_BEHIND <= starts[1][0] < GROWN_BEHIND <= starts[2][0] < STEPS
    assert starts[1][0] % COMMIT_EVERY == 0 or starts[1][0] % SAVED_EVERY == 0

    purpose = Run(setting, tmp_path / "purpose")
    for (_, size), steps in zip(starts, [starts[1][0], starts[2][0], STEPS], strict=True):
        with purpose.launch(str(size), train=[f"--steps={steps}"]) as job:
            [end] = job.wait(DEADLINE_SECONDS)
            assert end.code == 0, end.output
    found, meant = ending(run.directory, STEPS), ending(purpose.directory, STEPS)
    assert purpose.starts() == starts
    assert not found.proof and not meant.proof, found.proof + meant.proof
    assert found.tensors == meant.tensors  # by their hashes
