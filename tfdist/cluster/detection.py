"""Chooses strategy and cluster: the rules of `--strategy=auto`, and what explicit strategies require."""

import dataclasses
import functools

from tfdist.cluster import environment as sources
from tfdist.cluster.environment import Cluster, Environment
from tfdist.cluster.tf_config import EXAMPLE
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
_HOROVOD = ("Horovod", "MPI")
_ALLOCATORS = ("Slurm", "Kubernetes")
_ONE_PROCESS = ("single", "mirrored", "tpu")


@dataclasses.dataclass(frozen=True)
class Detection:
    """Result of `detect`.

    Attributes:
      cluster: this process's place among the job's processes.
      strategy: name of the strategy.
      reason: one sentence for the log.
    """

    cluster: Cluster
    strategy: str
    reason: str


def detect(env: Environment, strategy: str = "auto", local_devices: int = 1) -> Detection:
    """Chooses the strategy and determines this process's place among the job's processes.

    An explicit strategy wins. Otherwise, Horovod's or MPI's variables mean `horovod`; a TF_CONFIG with several workers,
    a Slurm step, a Kubernetes indexed Job or torchrun's variables mean `multiworker`; several local devices mean
    `mirrored`; and anything else means `single`.

    Args:
      env: environment of the process.
      strategy: "auto", or name of a strategy, which may be a third party's `package.module:Class`.
      local_devices: number of devices that this process would use by default, at least 1.

    Raises:
      InputError: sources disagree about this process's rank or the job's size, or do not suit the strategy.
    """
    cluster = _agreed([found for source in _SOURCES if (found := source(env))])
    if strategy == "auto":
        return _automatic(env, cluster, local_devices)
    if strategy in _ONE_PROCESS and cluster.size > 1:
        raise InputError(
            f"--strategy={strategy} is for one process; several would each train alone, into one directory. Received: "
            f"{_says(cluster)}. Use --strategy=auto, or start one process without {cluster.source}'s variables."
        )
    if strategy == "multiworker" and cluster == Cluster():
        raise InputError(
            f"--strategy=multiworker needs to know its workers. Received: no TF_CONFIG. Example: {EXAMPLE}"
        )
    if strategy == "multiworker" and cluster.size > 1 and not cluster.coordinator:
        raise InputError(
            f"--strategy=multiworker must know where rank 0 is. Received: {cluster.source}'s variables, which do not "
            "say. Set TFDIST_COORDINATOR=host:port."
        )
    return Detection(cluster, strategy, f"Using strategy {strategy}, set by --strategy; {_says(cluster)}.")


def _automatic(env: Environment, cluster: Cluster, local_devices: int) -> Detection:
    if cluster.source in _HOROVOD:
        return Detection(cluster, "horovod", f"Using strategy horovod, because {_says(cluster)}.")
    if cluster.size > 1:
        return Detection(cluster, "multiworker", f"Using strategy multiworker, because {_says(cluster)}.")
    strategy = "mirrored" if local_devices > 1 else "single"
    devices = f"{local_devices} local devices" if local_devices > 1 else "one local device"
    return Detection(
        cluster, strategy, f"Using strategy {strategy}, because this is one process with {devices}{_hint(env)}."
    )


def _agreed(found: list[Cluster]) -> Cluster:
    """Returns the first source that applies, completed by the others."""
    # If each task of a scheduler ran a launcher (srun torchrun; mpirun, whose daemons srun starts), the processes are
    # the launcher's. A source with one process is ignored, such as an interactive shell in a Slurm step.
    inner = max((c.size for c in found if c.source not in (*_ALLOCATORS, "TF_CONFIG")), default=0)
    found = [c for c in found if c.source not in _ALLOCATORS or c.size >= inner]
    speaking = [c for c in found if c.size > 1 or c.source in _HOROVOD]
    if not speaking:
        return found[0] if found else Cluster()
    for other in speaking[1:]:
        if (other.rank, other.size) != (speaking[0].rank, speaking[0].size):
            raise InputError(
                "The sources that say who this process is must agree. Received: "
                f"{_says(speaking[0])}; {_says(other)}. Clear the environment of the wrong one."
            )
    return functools.reduce(_complete, speaking)


def _complete(first: Cluster, other: Cluster) -> Cluster:
    return dataclasses.replace(
        first,
        addresses=first.addresses or other.addresses,
        coordinator=first.coordinator or other.coordinator,
    )


def _says(cluster: Cluster) -> str:
    if cluster == Cluster():
        return "this is one process"
    return f"{cluster.source} says that this is rank {cluster.rank} of {cluster.size}"


def _hint(env: Environment) -> str:
    """Returns a hint about an environment that looks like several processes but is not treated as such."""
    if env.get("SLURM_NTASKS", "1") != "1" and sources.from_slurm(env) is None:
        return f" (Slurm's allocation has {env['SLURM_NTASKS']} tasks, but srun did not start this process)"
    if "JOB_COMPLETION_INDEX" in env and "TFDIST_PROCESSES" not in env:
        return " (a Kubernetes indexed Job without TFDIST_PROCESSES: its pods are taken for independent runs)"
    return ""
