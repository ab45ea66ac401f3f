"""Determines this process's place in the job from all sources in its environment, which must agree."""

import dataclasses
import functools

from tfdist.cluster import environment as sources
from tfdist.cluster.environment import HOROVOD_LAUNCHERS, Cluster, Environment
from tfdist.errors import InputError

# In order of precedence; the first two are launchers that are used for Horovod.
_SOURCES = (
    sources.from_horovod,
    sources.from_mpi,
    sources.from_tf_config,
    sources.from_slurm,
    sources.from_kubernetes,
    sources.from_torchrun,
)
_ALLOCATORS = ("Slurm", "Kubernetes")


def detect_cluster(env: Environment) -> Cluster:
    """Determines this process's place among the job's processes.

    Args:
      env: environment of the process.

    Raises:
      InputError: sources disagree about this process's rank or the job's size.
    """
    return _agreed([found for source in _SOURCES if (found := source(env))])


def _agreed(found: list[Cluster]) -> Cluster:
    """Returns the first source that applies, completed by the others."""
    # If each task of a scheduler ran a launcher (srun torchrun; mpirun, whose daemons srun starts), the processes are
    # the launcher's. A source with one process is ignored, such as an interactive shell in a Slurm step.
    inner = max((c.size for c in found if c.source not in (*_ALLOCATORS, "TF_CONFIG")), default=0)
    found = [c for c in found if c.source not in _ALLOCATORS or c.size >= inner]
    speaking = [c for c in found if c.size > 1 or c.source in HOROVOD_LAUNCHERS]
    if not speaking:
        return found[0] if found else Cluster()
    for other in speaking[1:]:
        if (other.rank, other.size) != (speaking[0].rank, speaking[0].size):
            raise InputError(
                "The sources of this process's rank must agree. Received: "
                f"{describe(speaking[0])}; {describe(other)}. Unset the variables of the wrong one."
            )
    return functools.reduce(_complete, speaking)


def _complete(first: Cluster, other: Cluster) -> Cluster:
    return dataclasses.replace(
        first,
        addresses=first.addresses or other.addresses,
        coordinator=first.coordinator or other.coordinator,
    )


def describe(cluster: Cluster) -> str:
    """Returns a phrase with the rank, the size and the launcher of this process."""
    if cluster == Cluster():
        return "this is one process"
    return f"{cluster.source} says that this is rank {cluster.rank} of {cluster.size}"


def hint(env: Environment) -> str:
    """Returns a hint about an environment that looks like several processes but is not treated as such."""
    if env.get("SLURM_NTASKS", "1") != "1" and sources.from_slurm(env) is None:
        return f" (Slurm's allocation has {env['SLURM_NTASKS']} tasks, but srun did not start this process)"
    if "JOB_COMPLETION_INDEX" in env and "TFDIST_PROCESSES" not in env:
        return " (a Kubernetes indexed Job without TFDIST_PROCESSES: its pods are treated as independent runs)"
    return ""
