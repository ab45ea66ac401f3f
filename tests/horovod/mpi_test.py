"""Horovod over MPI, in processes that no mpirun has started, and in processes of mpirun."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("horovod")

from tests import processes
from tests.horovod.jobs import launched

pytestmark = pytest.mark.processes

BIN = pathlib.Path(sys.executable).parent
MPI = {"TFDIST_COMMUNICATION": "mpi"}
CYCLE = {"HOROVOD_CYCLE_TIME": "0.7"}
NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
PROGRAM = """
import os, signal, subprocess, sys
import tensorflow as tf
import tfdist.horovod as hvd
hvd.init()
def total():
    return float(hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)[0])
for start in range(2):
    print("ranks", hvd.rank(), hvd.size(), hvd.local_rank(), "mpi", hvd.mpi_enabled(), "sum", total(), flush=True)
    hvd.shutdown()
    hvd.init()
print("leaves", [name for name in os.environ if name.startswith("PMI_")], flush=True)
print("cycle", os.environ["HOROVOD_CYCLE_TIME"], flush=True)
if hvd.rank() == 1 and "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
while "killed" in sys.argv:
    total()
"""


@pytest.fixture(autouse=True)
def in_an_empty_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")


@pytest.mark.parametrize(
    ("launcher", "chosen", "cycle"),
    [
        pytest.param("tensorflow", {}, "2", marks=pytest.mark.full),
        pytest.param("horovod", CYCLE, "0.7", marks=pytest.mark.smoke("mpi")),
    ],
)
def test_programs_use_mpi_if_the_environment_says_so(launcher: str, chosen: dict[str, str], cycle: str) -> None:
    [output] = processes.finish(launched(["-c", PROGRAM], launcher=launcher), environment={**MPI, **chosen})
    for rank in range(2):
        said = re.findall(rf"^\[{rank}\] ranks (.*)$", output, re.MULTILINE)
        assert said == [f"{rank} 2 {rank} mpi True sum 3.0"] * 2  # also after a second start
    assert re.findall(r"^\[\d\] leaves (.*)$", output, re.MULTILINE) == ["[]"] * 2
    assert re.findall(r"^\[\d\] cycle (.*)$", output, re.MULTILINE) == [cycle] * 2


def test_a_killed_rank_ends_the_job_although_the_others_poll_for_it() -> None:
    [output] = processes.finish(launched(["-c", PROGRAM, "killed"], launcher="tensorflow"), environment=MPI, code=137)
    assert "tfdist launch: rank 1 ended with code 137 (killed by SIGKILL)" in output


def test_a_lost_rank_ends_the_others_without_a_launcher() -> None:
    config = '{"cluster": {"worker": ["%s", "%s"]}, "task": {"type": "worker", "index": {rank}}}'
    coordinator, *workers = processes.free_addresses(3)
    variables = {**MPI, "TFDIST_COORDINATOR": coordinator}
    command = ["env", f"TF_CONFIG={config % tuple(workers)}", sys.executable, "-c", PROGRAM, "killed"]
    with processes.job(command, 2, variables) as job:
        first, second = job.wait(300)
    assert (first.code, second.code) == (5, -9), first.output
    assert "rank 0 of 2: rank 1 is lost: " in first.output


def test_signals_have_their_usual_effects() -> None:
    """UCX, which MPICH loads, would handle them."""
    caught = (
        "import re, tfdist, horovod.tensorflow; print(re.search(r'SigCgt:.*', open('/proc/self/status').read())[0])"
    )
    done = subprocess.run([sys.executable, "-c", caught], capture_output=True, text=True, timeout=300)
    bits = int(done.stdout.split()[-1], 16)
    assert not [one for one in (signal.SIGHUP, signal.SIGSEGV, signal.SIGBUS) if bits >> (one - 1) & 1], done.stdout


ON_CORES = """
import os, pathlib, runpy, sys
from tfdist.cluster import affinity
affinity.QUOTA = pathlib.Path("none")
cores = set(range(4))
os.sched_getaffinity, os.cpu_count = lambda pid: cores, lambda: len(cores)
runpy.run_module("tfdist.train", run_name="__main__", alter_sys=True)
"""


def unwrapped(text: str) -> str:
    """Returns an output in which the rows of a run's description are not wrapped."""
    return re.sub(r"\n(\[\d+\] )? {10}", " ", text)


def test_auto_takes_mpi_if_the_ranks_have_cores_for_it_and_says_so() -> None:
    expected = r"Horovod uses MPICH [\d.]+, because all ranks are on one host, with 2 cores each\."
    train = launched(["-c", ON_CORES, "--steps=4", "--output_dir=run"])
    [output] = processes.finish(train, environment={"TFDIST_COMMUNICATION": "", "CUDA_VISIBLE_DEVICES": ""})
    assert re.search(rf"Horovod says that this is rank 0 of 2\. {expected[:-2]}$", unwrapped(output), re.MULTILINE)
    assert re.fullmatch(expected, json.loads(pathlib.Path("run/environment.json").read_text())["communication"])


def test_processes_of_mpirun_train_over_mpi() -> None:
    train = ("-m", "tfdist.train", "--strategy=horovod", "--steps=4", "--output_dir=run")
    [output] = processes.finish([str(BIN / "mpirun"), "-n", "2", sys.executable, *train])
    assert "MPI says that this is rank 0 of 2." in output and "run ended: done" in output


def test_processes_of_another_librarys_mpirun_do_not_train_alone() -> None:
    """MPICH would abort under Open MPI's."""
    numbers = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(NUMBERS, ("0", "2", "0", "2"), strict=True)}
    train = ("-m", "tfdist.train", "--strategy=horovod", "--steps=4", "--output_dir=run")
    [output] = processes.finish([sys.executable, *train], environment=numbers, code=2)
    assert re.search(r"Received: Open MPI's, and Horovod with MPICH [\d.]+\. Use that library's mpirun, or", output), (
        output
    )


def test_a_job_of_horovodrun_is_not_started_over_mpi_by_a_flag() -> None:
    train = ("-m", "tfdist.train", "--strategy=horovod", "--communication=mpi", "--steps=4", "--output_dir=run")
    with processes.job([str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable, *train], 1) as job:
        [end] = job.wait(300)
    assert end.code != 0
    assert "--communication=mpi is for jobs whose processes know where rank 0 is" in end.output, end.output


def test_horovodrun_starts_jobs_over_mpi() -> None:
    train = ("-m", "tfdist.train", "--strategy=horovod", "--steps=4", "--output_dir=run")
    path = {"PATH": f"{BIN}:{os.environ['PATH']}"}  # of mpirun
    [output] = processes.finish(
        [str(BIN / "horovodrun"), "--mpi", "-np", "2", sys.executable, *train], environment=path
    )
    assert re.search(r"is rank 0 of 2\. Horovod uses MPICH [\d.]+, because mpirun started", unwrapped(output))
