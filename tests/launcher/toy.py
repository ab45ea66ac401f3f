"""A toy training that resumes where it saved, and the launcher of its real processes."""

import contextlib
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests import jobs as processes
from tests.waiting import DEADLINE, wait_for

# By default ten updates, one per call; each needs all ranks. It saves every three updates, and when all agree to end.
PROGRAM = """
import os, pathlib, signal, sys, time
from tfdist.cluster.environment import from_tf_config
from tfdist.errors import Preempted
from tfdist.coordination import PeerFailureHandler, join
from tfdist.coordination.sync_points import SyncPoints
from tfdist.cluster.signals import termination_notices
from tfdist.cluster.progress_file import ProgressFile

saved, restart = pathlib.Path(sys.argv[1]), int(os.environ["TFDIST_RESTART"])
cluster = from_tf_config(os.environ)
rank = cluster.rank
{start}
group, progress = join(cluster), ProgressFile()

def save(step):
    if rank == 0:
        saved.write_text(str(step))
    group.barrier("saved")

def train(first, last):
    progress.note(first)
    with SyncPoints(group) as sync_points, termination_notices(lambda name: sync_points.request("preempt")):
        print(f"begins at {{first}} restart {{restart}} pid {{os.getpid()}} group {{os.environ['TFDIST_GROUP']}}", flush=True)
        print("launched", os.environ["TFDIST_LAUNCHED"], flush=True)
        for step in range(first + 1, last + 1):
            sync_points.begin(step)
            time.sleep(0.02)
            {fault}
            group.barrier("update")
            progress.note(step)
            due = sync_points.end_call(step)
            if "preempt" in due or step % 3 == 0:
                save(step)
            if "preempt" in due:
                {ending}
                raise Preempted(f"preempted at step {{step}}")

with PeerFailureHandler(group, cluster, grace=1.0):
    first = int(saved.read_text()) if saved.exists() else 0
    try:
        train(first, {last})
        print("done", flush=True)
        group.barrier("end")
    except Preempted as error:
        group.barrier("end")
        print(error, flush=True)
        group.leave(75, str(error))
        os._exit(75)
"""


class Launched:
    """A launcher, with the output of it and its ranks."""

    def __init__(self, job: processes.Job, directory: pathlib.Path):
        self.job, self.directory = job, directory

    def begun(self) -> list[tuple[int, int, int, int, str]]:
        """Returns rank, step, restart, pid and the group's address for each start of a rank."""
        found = re.findall(r"^\[(\d)\] begins at (\d+) restart (\d+) pid (\d+) group (\S+)", self.output, re.MULTILINE)
        return sorted((int(r), int(s), int(k), int(p), a) for r, s, k, p, a in found)

    def wait_for_ranks(self, count: int) -> list[int]:
        """Waits for `count` starts of ranks; returns the process ids of the newest attempt, by rank."""
        wait_for(lambda: len(self.begun()) >= count)
        newest = max(restart for _, _, restart, _, _ in self.begun())
        return [pid for _, _, restart, pid, _ in self.begun() if restart == newest]

    @property
    def output(self) -> str:
        return self.job.output(0)

    @property
    def said(self) -> list[str]:
        """The launcher's lines, without that about TensorFlow's ports."""
        lines = self.output.splitlines()
        return [line for line in lines if line.startswith("tfdist launch: ") and "accept anyone who can" not in line]

    @property
    def log(self) -> str:
        return (self.directory / "logs" / "rank-0.log").read_text()

    def end(self) -> int:
        [ended] = self.job.wait(DEADLINE)
        print(ended.output)  # shown by pytest if the test fails
        return ended.code


@contextlib.contextmanager
def launched(
    directory: pathlib.Path,
    *flags: str,
    fault: str = "pass",
    last: object = 10,
    size: object = 2,
    ending: str = "pass",
    start: str = "pass",
    through: Sequence[str] = (),
) -> Iterator[Launched]:
    """Starts a launcher of `size` ranks, which train until update `last`; `through` is a prefix of its command."""
    program = PROGRAM.format(fault=fault, last=last, ending=ending, start=start)
    where = (f"--processes={size}", f"--log_dir={directory / 'logs'}", "--restart_backoff_seconds=0.1")
    command = [sys.executable, "-m", "tfdist.launch", *where, *flags, "--", sys.executable, "-c", program]
    with processes.job([*through, *command, str(directory / "saved")], 1) as job:
        yield Launched(job, directory)


def launches(*flags: str, **options: Any) -> Any:
    """Returns a fixture: a function that starts launchers with some flags and options, and others of a test."""

    @pytest.fixture
    def launch(tmp_path: pathlib.Path) -> Iterator[Callable[..., Launched]]:
        with contextlib.ExitStack() as stack:
            yield lambda *more, **others: stack.enter_context(launched(tmp_path, *flags, *more, **options | others))

    return launch


def die(when: str, how: str = "os.kill(os.getpid(), signal.SIGKILL)") -> str:
    """Returns a fault: code that a rank runs in each update in which a condition holds."""
    return f"if {when}: {how}"
