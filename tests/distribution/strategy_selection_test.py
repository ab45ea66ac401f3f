"""Choosing the strategy from each source of information."""

import json
import subprocess
import sys

import pytest

from tfdist.cluster.environment import Cluster
from tfdist.config.strategy_registry import Declaration, Processes
from tfdist.distribution.strategy_selection import choose_strategy
from tfdist.errors import InputError


def tf_config(size, index):
    workers = [f"h{i}:1" for i in range(size)]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}


def horovod(rank, size):
    return {"HOROVOD_RANK": rank, "HOROVOD_SIZE": size, "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}


def mpi(rank, size):
    return {name.replace("HOROVOD", "OMPI_COMM_WORLD"): value for name, value in horovod(rank, size).items()}


def slurm(rank, size):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[0-9]", "SLURM_STEP_TASKS_PER_NODE": "1"}
    return step | {"SLURM_JOB_ID": "1", "SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": "0"}


def pod(rank, size):
    return {"JOB_COMPLETION_INDEX": rank, "TFDIST_PROCESSES": size, "JOB_NAME": "j", "SERVICE": "s"}


def torchrun(rank, size):
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "m", "MASTER_PORT": "5"}


@pytest.mark.parametrize(
    ("env", "devices", "strategy", "source", "rank"),
    [
        ({}, 1, "single", "one process", 0),
        ({}, 2, "mirrored", "one process", 0),
        (horovod("1", "2"), 2, "horovod", "Horovod", 1),
        (horovod("0", "1"), 2, "horovod", "Horovod", 0),
        (mpi("1", "2"), 1, "horovod", "MPI", 1),
        (tf_config(2, 1), 2, "multiworker", "TF_CONFIG", 1),
        (tf_config(1, 0), 1, "single", "TF_CONFIG", 0),
        (tf_config(1, 0), 2, "mirrored", "TF_CONFIG", 0),
        (slurm("1", "2"), 1, "multiworker", "Slurm", 1),
        (slurm("0", "1"), 1, "single", "Slurm", 0),
        (pod("1", "2"), 1, "multiworker", "Kubernetes", 1),
        (torchrun("1", "2"), 1, "multiworker", "torchrun", 1),
        # Sources that agree, in order of precedence.
        (horovod("1", "2") | tf_config(2, 1), 1, "horovod", "Horovod", 1),
        (tf_config(2, 1) | slurm("1", "2"), 1, "multiworker", "TF_CONFIG", 1),
        (slurm("1", "2") | torchrun("1", "2"), 1, "multiworker", "Slurm", 1),
        # A launcher within a scheduler's task, and a source that describes a single process.
        (slurm("1", "2") | torchrun("2", "4"), 1, "multiworker", "torchrun", 2),
        (slurm("0", "1") | mpi("3", "4"), 1, "horovod", "MPI", 3),
        (slurm("0", "2") | mpi("5", "6"), 1, "horovod", "MPI", 5),
        (pod("1", "2") | torchrun("3", "4"), 1, "multiworker", "torchrun", 3),
        (tf_config(1, 0) | horovod("1", "2"), 1, "horovod", "Horovod", 1),
        (tf_config(2, 1) | slurm("0", "1"), 1, "multiworker", "TF_CONFIG", 1),
    ],
)
def test_auto(env, devices, strategy, source, rank):
    found = choose_strategy(env, local_devices=devices)
    assert (found.strategy, found.cluster.source, found.cluster.rank) == (strategy, source, rank)
    assert strategy in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize("strategy", ["auto", "horovod", "multiworker", "single", "third.party:Class"])
@pytest.mark.parametrize(
    ("env", "first", "second"),
    [
        (horovod("0", "2") | tf_config(3, 0), "Horovod says that this is rank 0 of 2", "TF_CONFIG says .* rank 0 of 3"),
        (horovod("0", "2") | tf_config(2, 1), "Horovod .* rank 0 of 2", "TF_CONFIG .* rank 1 of 2"),
        (horovod("0", "1") | tf_config(2, 1), "Horovod .* rank 0 of 1", "TF_CONFIG .* rank 1 of 2"),
        (horovod("0", "2") | mpi("1", "2"), "Horovod .* rank 0 of 2", "MPI .* rank 1 of 2"),
        (tf_config(2, 0) | slurm("0", "4"), "TF_CONFIG .* rank 0 of 2", "Slurm .* rank 0 of 4"),
        (tf_config(4, 0) | slurm("0", "2"), "TF_CONFIG .* rank 0 of 4", "Slurm .* rank 0 of 2"),
        (horovod("0", "2") | slurm("0", "4"), "Horovod .* rank 0 of 2", "Slurm .* rank 0 of 4"),
        (slurm("0", "2") | torchrun("1", "2"), "Slurm .* rank 0 of 2", "torchrun .* rank 1 of 2"),
        (tf_config(2, 0) | pod("0", "3"), "TF_CONFIG .* rank 0 of 2", "Kubernetes .* rank 0 of 3"),
    ],
)
def test_sources_that_disagree(env, first, second, strategy):
    with pytest.raises(InputError, match=f"must give this process the same rank and size.*{first}; {second}"):
        choose_strategy(env, strategy)


@pytest.mark.parametrize(
    "env", [horovod("1", "2"), mpi("1", "2"), tf_config(2, 1), slurm("1", "2"), torchrun("1", "2")]
)
def test_explicit_strategies_take_any_source(env):
    for strategy in ("horovod", "third.party:Class"):
        assert choose_strategy(env, strategy).cluster.rank == 1
    assert choose_strategy(env | {"TFDIST_COORDINATOR": "h:1"}, "multiworker").cluster.size == 2


def declared(processes):
    return {"declaration": Declaration(name="own", processes=processes)}


OWN = "third.party:Class"


@pytest.mark.parametrize(
    ("env", "strategy", "options", "message"),
    [
        *(
            (tf_config(2, 1), name, {}, f"--strategy={name} is for a single process.*TF_CONFIG .* rank 1 of 2.*auto")
            for name in ("single", "mirrored", "tpu")
        ),
        (mpi("1", "2"), "multiworker", {}, "MPI's variables.*TFDIST_COORDINATOR"),  # where rank 0 is
        ({}, OWN, declared(Processes.SEVERAL), f"--strategy={OWN} needs to know its workers"),
        (tf_config(2, 1), OWN, declared(Processes.ONE), f"--strategy={OWN} is for a single process"),
    ],
)
def test_numbers_of_processes_that_a_strategy_cannot_have(env, strategy, options, message):
    with pytest.raises(InputError, match=message):
        choose_strategy(env, strategy, **options)


def test_one_process():
    for strategy in ("single", "mirrored", "tpu", "multiworker"):
        assert choose_strategy(tf_config(1, 0), strategy).cluster.size == 1
    for strategy in ("single", "mirrored", "tpu"):
        assert choose_strategy({}, strategy, local_devices=4).strategy == strategy
    for strategy in ("horovod", OWN):  # without any source
        assert choose_strategy({}, strategy).cluster == Cluster()


def test_the_reason_tells_what_was_not_taken_for_several_processes():
    batch_script = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}
    assert "srun did not start this process" in choose_strategy(batch_script).reason
    assert "TFDIST_PROCESSES" in choose_strategy({"JOB_COMPLETION_INDEX": "1"}).reason
    assert "(" not in choose_strategy(slurm("0", "1")).reason


def test_no_tensorflow():
    code = "import sys, tfdist.distribution.strategy_selection; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
