"""The library of Horovod's collectives that `--communication=auto` takes: MPI where each rank has a core for it, else Gloo.

Between processes of one host, MPI has a fraction of Gloo's latency, but waits by polling, which takes a core from computing.
The decision depends only on facts that are the same in every run of a command on the same machine, not on how busy its cores
are or on a measurement at the start: another library may sum in another order, and Horovod cannot replace the library of
a process that it has started with.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from tfdist.cluster.affinity import cores_per_process, cpu_quota
from tfdist.cluster.devices import BINDING_LAUNCHERS
from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group
from tfdist.coordination.join import ADDRESS_VARIABLE, ELASTIC_VARIABLE
from tfdist.distribution import horovod_mpi

ELASTIC_VARIABLES = (ELASTIC_VARIABLE, "HOROVOD_ELASTIC")  # of `launch` and of horovodrun
CORES = 2  # of each rank, for MPI: one that polls, and one that computes meanwhile
# The user's choice, unless a launcher of Horovod's processes has set them.
_HOROVOD_VARIABLES = ("HOROVOD_CPU_OPERATIONS", "HOROVOD_CONTROLLER")


class Choice(NamedTuple):
    """A library and why it was chosen.

    Attributes:
      library: "gloo" or "mpi".
      reason: a clause that begins with "because" or "as".
    """

    library: str
    reason: str


def choose(group: Group, cluster: Cluster) -> Choice:
    """Chooses the library, the same one on every member: Gloo if any of them has a reason against MPI.

    Args:
      group: the job's group. All members must call this function.
      cluster: this process in the job.
    """
    cores = cores_per_process(cluster.local_size, assigned=cluster.source in BINDING_LAUNCHERS)
    quota = cpu_quota() / cluster.local_size
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    own = choice(cluster, min(cores, quota), horovod_mpi.library(), has_gpus, os.environ)
    choices = [Choice(*each) for each in group.gather("horovod/automatic", list(own))]
    return next((each for each in choices if each.library == "gloo"), own)


def choice(cluster: Cluster, cores: float, mpi: str, has_gpus: bool, environment: Mapping[str, str]) -> Choice:
    """Returns what one rank would choose.

    Args:
      cluster: this process in the job.
      cores: number of cores that it may use.
      mpi: see `horovod_mpi.library`.
      has_gpus: whether it has GPUs.
      environment: its environment variables.
    """
    against_mpi = (
        (cluster.size == 1, "this is one process"),
        (any(environment.get(name) == "1" for name in ELASTIC_VARIABLES), "the job is elastic"),
        ("HOROVOD_RANK" in environment and ADDRESS_VARIABLE not in environment, "horovodrun started the processes"),
        (has_gpus, "the ranks have GPUs"),
        (cluster.local_size < cluster.size, "the job is on several hosts"),
        (cores < CORES, f"MPI needs {CORES} cores per rank, of which it keeps one busy, and there are {cores:g}"),
        (not mpi, "Horovod was built without MPI"),
        (not horovod_mpi.starts_without_mpirun(mpi), f"only mpirun can start {mpi}"),
    )
    for applies, reason in against_mpi:
        if applies:
            return Choice("gloo", f"because {reason}")
    return Choice("mpi", f"because all ranks are on one host, with {cores:g} cores each")


def from_horovods_variables(environment: Mapping[str, str]) -> Choice | None:
    """Returns the library that the user has named in Horovod's own variables, if any."""
    if "HOROVOD_RANK" not in environment:  # otherwise the launcher has set them
        for name in _HOROVOD_VARIABLES:
            if (library := environment.get(name, "").lower()) in ("gloo", "mpi"):
                return Choice(library, f"as {name} says")
    return None
