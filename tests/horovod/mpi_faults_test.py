"""Jobs of the launcher over MPI that lose a rank, or whose ranks are stopped, preempted or late: exit codes and causes."""

import pathlib
import re
import signal

import psutil
import pytest

pytest.importorskip("horovod")

from tests import processes
from tests.end_to_end.chaos.striking import child_of_rank
from tests.horovod.jobs import launched

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.separable]

START_SECONDS = 300.0


def train(*flags: str) -> list[str]:
    model = ("--dataset=digits", "--model=mlp", "--steps=100000", "--epochs=0", "--output_dir=run")
    return ["-m", "tfdist.train", "--strategy=horovod", "--communication=mpi", *model, *flags]


@pytest.fixture(autouse=True)
def in_an_empty_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)


def send_to_rank_1(job: processes.Job, number: signal.Signals) -> None:
    victim = child_of_rank(job.processes[0].pid, 1)
    assert victim is not None
    psutil.Process(victim).send_signal(number)


def preempted(job: processes.Job) -> str:
    """Preempts a job; returns the name of its newest checkpoint."""
    job.processes[0].send_signal(signal.SIGTERM)
    [end] = job.wait(300)
    assert end.code == 75, end.output
    return max(path.name for path in pathlib.Path("run/checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("flags", "code", "words", "details"),
    [
        (  # an evaluation is not limited
            ("--stall_warning_seconds=2", "--stall_shutdown_seconds=4", "--eval_every=1000000"),
            4,
            ["ended with code 4 (stalled): the call from step "],
            "in a call: 0; no answer: 1.",
        ),
        ((), 5, ["rank 1", "no heartbeat for 20 s"], ""),
    ],
    ids=["stalled", "lost"],
)
def test_a_rank_that_is_stopped_ends_the_job(flags: tuple[str, ...], code: int, words: list[str], details: str) -> None:
    """And no process is left."""
    with processes.job(launched(train(*flags)), 1) as job:
        job.wait_for(0, "step 20/", START_SECONDS)
        ranks = psutil.Process(job.processes[0].pid).children(recursive=True)
        send_to_rank_1(job, signal.SIGSTOP)
        [end] = job.wait(300)
        _, left = psutil.wait_procs(ranks, 5)
    assert not left and end.code == code, end.output
    lines = end.output.splitlines()
    [why] = [line for line in lines if re.match(r"tfdist launch: .*(ended with code|is lost)", line)]
    assert all(word in why for word in words) and details in end.output, why


def test_a_job_that_is_preempted_is_saved_and_goes_on() -> None:
    with processes.job(launched(train()), 1) as job:
        job.wait_for(0, "step 20/", START_SECONDS)
        saved = preempted(job)
    with processes.job(launched(train()), 1) as job:
        job.wait_for(0, f"resuming  from run/checkpoints/{saved}", START_SECONDS)
        job.wait_for(0, "  train  ", START_SECONDS)
        assert preempted(job) > saved


def test_a_rank_that_is_killed_is_restarted_from_a_checkpoint() -> None:
    with processes.job(launched(train("--checkpoint_every=10"), "--max_restarts=1"), 1) as job:
        job.wait_for(0, "Saved step 20 ", START_SECONDS)
        send_to_rank_1(job, signal.SIGKILL)
        job.wait_for(0, "resuming  from run/checkpoints/step-", START_SECONDS)
        [step] = re.findall(r"resuming  from run/checkpoints/step-(\d+)", job.output(0))
        job.wait_for(0, f"Saved step {int(step) + 10} ", START_SECONDS)  # a signal before the first step would end it
        job.wait_for(0, "restart 1 of 1 after step ", 1)
        [why] = [line for line in job.output(0).splitlines() if "restart 1 of 1" in line]
        assert "tfdist launch: rank 1 ended with code 137 (killed by SIGKILL). Its log: " in why, why
        preempted(job)
