"""The environments in which processes can be started, with one table for each, and several at once."""

import json

import pytest

from tfdist.cluster import environment
from tfdist.cluster.environment import Cluster, describe, detect_cluster
from tfdist.errors import InputError


def tf_config(workers, index=0):
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}


def numbered(prefix, *numbers, names=("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")):
    return {prefix + name: str(number) for name, number in zip(names, numbers, strict=True)}


MPICH = numbered("", 1, 2, 1, 2, names=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
STEP = {
    "SLURM_JOB_ID": "20123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
IN_STEP = Cluster(5, 7, 1, 3, (), "gpu07:12123", "Slurm")
POD = {"JOB_COMPLETION_INDEX": "2", "TFDIST_PROCESSES": "3"}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "2000"}
TORCHRUN = TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
AT = {"TFDIST_COORDINATOR": "boss:9"}


@pytest.mark.parametrize(
    ("source", "env", "expected"),
    [
        ("tf_config", {}, None),
        ("tf_config", {"TF_CONFIG": " "}, None),
        ("tf_config", {"TF_CONFIG": "{}"}, None),
        ("tf_config", tf_config(["a:1"]), Cluster(0, 1, 0, 1, ("a:1",), "", "TF_CONFIG")),
        ("tf_config", tf_config(["a:1"]) | AT, Cluster(0, 1, 0, 1, ("a:1",), "", "TF_CONFIG")),
        ("tf_config", tf_config(["a:1", "b:1"], 1), Cluster(1, 2, 0, 1, ("a:1", "b:1"), "a:1001", "TF_CONFIG")),
        ("tf_config", tf_config(["a:1", "b:1"]) | AT, Cluster(0, 2, 0, 1, ("a:1", "b:1"), "boss:9", "TF_CONFIG")),
        (
            "tf_config",
            tf_config(["a:1", "b:1", "A:2", "b:2", "a:3"], 2),
            Cluster(2, 5, 1, 3, ("a:1", "b:1", "A:2", "b:2", "a:3"), "a:1001", "TF_CONFIG"),
        ),
        (
            "tf_config",
            tf_config(["localhost:1", "127.0.0.1:2"], 1),
            Cluster(1, 2, 1, 2, ("localhost:1", "127.0.0.1:2"), "localhost:1001", "TF_CONFIG"),
        ),
        ("horovod", {"HOROVOD_FUSION_THRESHOLD": "0"}, None),
        ("horovod", numbered("HOROVOD_", 3, 4, 1, 2), Cluster(3, 4, 1, 2, source="Horovod")),
        ("horovod", numbered("HOROVOD_", 3, 4, 1, 2) | AT, Cluster(3, 4, 1, 2, (), "boss:9", "Horovod")),
        ("mpi", {}, None),
        ("mpi", numbered("OMPI_COMM_WORLD_", 3, 4, 1, 2), Cluster(3, 4, 1, 2, source="MPI")),
        ("mpi", MPICH, Cluster(1, 2, 1, 2, source="MPI")),
        ("mpi", STEP | {"PMI_RANK": "5", "PMI_SIZE": "7"}, None),
        ("mpi", STEP | MPICH, Cluster(1, 2, 1, 2, source="MPI")),
        ("slurm", {}, None),
        ("slurm", STEP, IN_STEP),
        ("slurm", STEP | AT, Cluster(5, 7, 1, 3, (), "boss:9", "Slurm")),
        ("slurm", STEP | {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "7"}, IN_STEP),
        ("slurm", STEP | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "gpu07"}, IN_STEP),
        ("slurm", STEP | {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "3"}, IN_STEP),
        ("slurm", STEP | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, Cluster(source="Slurm")),
        # A batch script: the job has seven tasks, but this process is none of them.
        ("slurm", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        ("slurm", STEP | {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"}, None),  # a batch script
        ("slurm", STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, None),  # salloc's interactive shell
        ("kubernetes", {}, None),
        ("kubernetes", {"JOB_COMPLETION_INDEX": "2"}, None),
        ("kubernetes", {"TFDIST_PROCESSES": "3"}, None),
        ("kubernetes", {"JOB_COMPLETION_INDEX": "2", "TFDIST_PROCESSES": "1"}, Cluster(source="Kubernetes")),
        ("kubernetes", POD | AT, Cluster(2, 3, 0, 1, (), "boss:9", "Kubernetes")),
        ("kubernetes", POD | {"JOB_NAME": "j", "SERVICE": "s"}, Cluster(2, 3, 0, 1, (), "j-0.s:12000", "Kubernetes")),
        ("torchrun", {"RANK": "0", "WORLD_SIZE": "1"}, None),
        ("torchrun", TORCH, Cluster(3, 4, 0, 1, (), "node0:2000", "torchrun")),
        ("torchrun", TORCHRUN, Cluster(3, 4, 1, 2, (), "node0:2001", "torchrun")),
        ("torchrun", TORCHRUN | AT, Cluster(3, 4, 1, 2, (), "boss:9", "torchrun")),
    ],
)
def test_source(source, env, expected):
    assert getattr(environment, f"from_{source}")(env) == expected


@pytest.mark.parametrize(
    ("source", "env", "message"),
    [
        ("tf_config", tf_config(["a:1", "b:1"]) | {"TFDIST_COORDINATOR": "boss"}, "host:port. Received: 'boss'"),
        ("horovod", {"HOROVOD_SIZE": "2"}, "Received no HOROVOD_RANK"),
        ("horovod", numbered("HOROVOD_", 2, 2, 0, 1), "Received: rank 2 of 2"),
        ("horovod", numbered("HOROVOD_", -1, 2, 0, 1), "Received: rank -1 of 2"),
        ("horovod", numbered("HOROVOD_", 0, 2, 1, 1), "local rank 1 of 1"),
        ("horovod", numbered("HOROVOD_", 0, 2, 0, 3), "local rank 0 of 3"),
        ("mpi", {"OMPI_COMM_WORLD_RANK": "0"}, "Received no OMPI_COMM_WORLD_SIZE"),
        ("mpi", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "Received no MPI_LOCALRANKID"),
        ("slurm", {k: v for k, v in STEP.items() if k != "SLURM_JOB_ID"}, "Received no SLURM_JOBID"),
        ("slurm", {k: v for k, v in STEP.items() if k != "SLURM_STEP_NODELIST"}, "Received no SLURM_STEP_NODELIST"),
        ("slurm", STEP | {"SLURM_STEP_NODELIST": "gpu[1"}, "must read like gpu"),
        ("slurm", STEP | {"SLURM_STEP_TASKS_PER_NODE": ""}, "Received no SLURM_STEP_TASKS_PER_NODE"),
        ("kubernetes", POD, "neither TFDIST_COORDINATOR nor JOB_NAME"),
        ("kubernetes", POD | AT | {"JOB_COMPLETION_INDEX": "3"}, "Received: rank 3 of 3"),
        ("torchrun", TORCH | {"MASTER_PORT": "65536"}, "must be host:port"),
    ],
)
def test_errors_are_one_line(source, env, message):
    """Others are in tests/cli/wrong_uses.tsv."""
    with pytest.raises(InputError, match=message) as error:
        getattr(environment, f"from_{source}")(env)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "env",
    [
        tf_config(["a:1"]),
        numbered("HOROVOD_", 0, 1, 0, 1),
        numbered("OMPI_COMM_WORLD_", 0, 1, 0, 1),
        MPICH,
        STEP,
        POD,
        TORCHRUN,
    ],
)
def test_without_rank_variables_nobody_is_known(env):
    sources = [getattr(environment, name) for name in dir(environment) if name.startswith("from_")]
    assert any(source(env | AT) for source in sources)
    assert [source(environment.without_rank_variables(env)) for source in sources] == [None] * 6


def test_without_rank_variables_keeps_the_rest():
    env = {"PATH": "/bin", "HOROVOD_FUSION_THRESHOLD": "0", "SLURM_JOB_ID": "7", "TFDIST_COORDINATOR": "h:1"}
    assert environment.without_rank_variables(env | MPICH) == env


HOROVOD = numbered("HOROVOD_", 1, 2, 0, 1)


def test_sources_that_agree_complete_each_other():
    found = detect_cluster(HOROVOD | tf_config(["h0:1", "h1:1"], 1))
    assert found == Cluster(1, 2, 0, 1, ("h0:1", "h1:1"), "h0:1001", "Horovod")
    assert describe(found) == "Horovod says that this is rank 1 of 2"


def test_sources_that_disagree_are_refused():
    with pytest.raises(
        InputError, match="Horovod says that this is rank 1 of 2; TF_CONFIG says that this is rank 0 of 2"
    ):
        detect_cluster(HOROVOD | tf_config(["h0:1", "h1:1"], 0))


def test_one_process_without_any_source():
    assert detect_cluster({}) == Cluster()
    assert describe(Cluster()) == "this is a single process"
