"""Reads the rank and size of this process from the variables of launchers and schedulers, which must agree.

Each `from_*` returns None if its environment did not start this process, and raises `InputError` if its variables are
incomplete or contradictory. `TFDIST_COORDINATOR=host:port` overrides the address at which rank 0 serves the `Group`.
"""

import dataclasses
import re
from collections.abc import Mapping

from tfdist.cluster import tf_config
from tfdist.errors import InputError

_NODES = re.compile(r"((?:\[\d[\d,-]*\]|[^\[\],\s])+)(?:,.*)?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(text: str) -> str:
    """Returns the first host of Slurm's node list: `gpu09` of `gpu[09-10,12],login1`.

    Raises:
      InputError: `text` is not a node list.
    """
    nodes = _NODES.fullmatch(text.strip())
    if not nodes:
        raise InputError(f"A list of nodes must read like gpu[01-03,07],login1. Received: {text!r}.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes[1])


def expand_counts(text: str) -> list[int]:
    """Expands a list of counts: `4(x2),3` is 4, 4, 3.

    Raises:
      InputError: `text` is not a list of counts.
    """
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise InputError(f"A list of task counts must read like 4(x2),3. Received: {text!r}.")
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


Environment = Mapping[str, str]

HOROVOD_LAUNCHERS = ("Horovod", "MPI")  # launchers with which `--strategy=auto` selects Horovod
_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
CONTROL_PORT = 12000  # for pods, each of which has its own network namespace and hence its own ports
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # of Slurm's own steps, such as batch scripts and interactive shells
_RANK_VARIABLES = re.compile(
    "TF_CONFIG|HOROVOD_(CROSS_|LOCAL_)?(RANK|SIZE)|OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)|PMI_(RANK|SIZE)|SLURM_PROCID"
    "|MPI_LOCAL(RANKID|NRANKS)|JOB_COMPLETION_INDEX|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)"
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a job, as seen by one of them.

    Attributes:
      rank: rank of this process, in [0, size).
      size: number of processes of the job.
      local_rank: rank of this process on its host, in [0, local_size).
      local_size: number of the job's processes on this host.
      addresses: `host:port` of each process's TensorFlow server, by rank; empty if unknown (the processes then choose
        ports and exchange them over the `Group`).
      coordinator: `host:port` of the process that serves the `Group`; empty for a single process, or if unknown (the
        engine then exchanges it).
      source: the launcher or scheduler that started the process, for logs: "TF_CONFIG", "Horovod", "MPI", "Slurm", ...
      servers: number of parameter servers according to the environment; they have the last ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    addresses: tuple[str, ...] = ()
    coordinator: str = ""
    source: str = "one process"
    servers: int = 0


def from_tf_config(env: Environment) -> Cluster | None:
    """Reads TF_CONFIG; equal host names mean one host. The group is at `tf_config.control_address`."""
    text = env.get("TF_CONFIG", "").strip()
    if text in ("", "{}"):  # TensorFlow treats both as no cluster
        return None
    addresses, rank, servers = tf_config.parse(text)
    hosts = [tf_config.host(address) for address in addresses]
    local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    ranks = rank, len(addresses), local_rank, local_size
    cluster = _cluster(env, "TF_CONFIG", ranks, tf_config.control_address(addresses))
    return dataclasses.replace(cluster, addresses=addresses, servers=servers)


def from_horovod(env: Environment) -> Cluster | None:
    """Reads horovodrun's variables: HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK and HOROVOD_LOCAL_SIZE."""
    if not {"HOROVOD_RANK", "HOROVOD_SIZE"} & env.keys():
        return None
    return _cluster_from_variables(env, "Horovod", *(f"HOROVOD_{name}" for name in _NUMBERS))


def from_mpi(env: Environment) -> Cluster | None:
    """Reads mpirun's variables: OMPI_COMM_WORLD_* (Open MPI), or PMI_* and MPI_LOCAL* (MPICH, Intel MPI).

    Inside a Slurm step, PMI_* without MPI_LOCALRANKID comes from srun's PMI plugin instead of mpirun.
    """
    if "OMPI_COMM_WORLD_RANK" in env:
        return _cluster_from_variables(env, "MPI", *(f"OMPI_COMM_WORLD_{name}" for name in _NUMBERS))
    if "PMI_RANK" not in env or ("MPI_LOCALRANKID" not in env and "SLURM_STEP_ID" in env):
        return None
    return _cluster_from_variables(env, "MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def from_slurm(env: Environment) -> Cluster | None:
    """Reads a Slurm step's variables; the group is on the step's first host, at port 12000 + job id modulo 20000.

    Only processes started by srun belong to a job with several processes. A batch script, or a shell inside an allocation,
    also has SLURM_NTASKS and SLURM_PROCID=0, but no SLURM_STEP_ID, or one of Slurm's special numbers. Simultaneous steps of
    a job with the same first host each need a TFDIST_COORDINATOR.
    """
    if "SLURM_PROCID" not in env or not env.get("SLURM_STEP_ID", "").isdigit():
        return None
    if int(env["SLURM_STEP_ID"]) >= _FIRST_SPECIAL_STEP:
        return None
    size = _read_integer(env, "Slurm", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    local_size = min(_slurm_local_size(env), size)
    ranks = _read_integer(env, "Slurm", "SLURM_PROCID"), size, _read_integer(env, "Slurm", "SLURM_LOCALID"), local_size
    if size == 1:
        return _cluster(env, "Slurm", ranks)
    job = _read_integer(env, "Slurm", "SLURM_JOB_ID" if "SLURM_JOB_ID" in env else "SLURM_JOBID")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise _missing_variable("Slurm", "SLURM_STEP_NODELIST")
    return _cluster(env, "Slurm", ranks, f"{first_host(nodes)}:{12000 + job % 20000}")


def from_kubernetes(env: Environment) -> Cluster | None:
    """Reads a Kubernetes indexed Job: JOB_COMPLETION_INDEX, and variables that its manifest must set.

    TFDIST_PROCESSES is the number of pods that train together (the Job's `completions`); without it, each pod is an
    independent run. The group is at TFDIST_COORDINATOR, or in pod 0 at JOB_NAME-0.SERVICE, where SERVICE is
    the Job's headless service.
    """
    if "JOB_COMPLETION_INDEX" not in env or "TFDIST_PROCESSES" not in env:
        return None
    size = _read_integer(env, "Kubernetes", "TFDIST_PROCESSES")
    if size == 1:
        return Cluster(source="Kubernetes")
    rank = _read_integer(env, "Kubernetes", "JOB_COMPLETION_INDEX")
    coordinator = ""
    if env.get("JOB_NAME") and env.get("SERVICE"):
        coordinator = f"{env['JOB_NAME']}-0.{env['SERVICE']}:{CONTROL_PORT}"
    elif not env.get("TFDIST_COORDINATOR"):
        raise InputError(
            f"Kubernetes: {size} pods must know where pod 0 is. Received: neither TFDIST_COORDINATOR nor JOB_NAME and "
            "SERVICE. Set them in the Job's manifest."
        )
    return _cluster(env, "Kubernetes", (rank, size, 0, 1), coordinator)


def from_torchrun(env: Environment) -> Cluster | None:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (29500), LOCAL_RANK (0), LOCAL_WORLD_SIZE (1).

    The group is at MASTER_ADDR:MASTER_PORT. Under torchrun itself, whose agent holds that port, it is at the next port.
    """
    if not {"RANK", "WORLD_SIZE"} <= env.keys() or "MASTER_ADDR" not in env and env["WORLD_SIZE"].strip() in ("", "1"):
        return None
    if "MASTER_ADDR" not in env:
        raise InputError(
            f"RANK and WORLD_SIZE={env['WORLD_SIZE']} require the address of rank 0. "
            "Received no MASTER_ADDR. Set it, or unset RANK and WORLD_SIZE."
        )
    variables = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500", **env}
    port = _read_integer(variables, "torchrun", "MASTER_PORT")
    port += env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return _cluster_from_variables(variables, "torchrun", *names, coordinator=f"{env['MASTER_ADDR']}:{port}")


def without_rank_variables(env: Environment) -> dict[str, str]:
    """Returns the environment without the variables that give a process its rank and size; a launcher sets its own."""
    return {name: value for name, value in env.items() if not _RANK_VARIABLES.fullmatch(name)}


def _cluster_from_variables(env: Environment, source: str, *variables: str, coordinator: str = "") -> Cluster:
    rank, size, local_rank, local_size = (_read_integer(env, source, name) for name in variables)
    return _cluster(env, source, (rank, size, local_rank, local_size), coordinator)


def _cluster(env: Environment, source: str, ranks: tuple[int, int, int, int], coordinator: str = "") -> Cluster:
    rank, size, local_rank, local_size = ranks
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise InputError(
            f"{source}: rank must be in [0, size) and local rank in [0, local size). Received: rank {rank} of {size}, "
            f"local rank {local_rank} of {local_size}. Correct {source}'s variables, or unset them."
        )
    coordinator = env.get("TFDIST_COORDINATOR") or coordinator
    if coordinator and not tf_config.is_address(coordinator):
        raise InputError(
            f"The coordinator's address must be host:port. Received: {coordinator!r}. Set TFDIST_COORDINATOR."
        )
    return Cluster(rank, size, local_rank, local_size, coordinator=coordinator if size > 1 else "", source=source)


def _read_integer(env: Environment, source: str, name: str) -> int:
    if name not in env:
        raise _missing_variable(source, name)
    try:
        return int(env[name])
    except ValueError as error:
        raise InputError(f"{source}: {name} must be an integer. Received: {env[name]!r}.") from error


def _missing_variable(source: str, name: str) -> InputError:
    return InputError(
        f"{source}'s variables must be complete. Received no {name}. Start the processes with {source}'s own launcher."
    )


def _slurm_local_size(env: Environment) -> int:
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE")
    if not text:
        raise _missing_variable("Slurm", "SLURM_STEP_TASKS_PER_NODE")
    counts = expand_counts(text)
    node = _read_integer({"SLURM_NODEID": "0", **env}, "Slurm", "SLURM_NODEID")
    return counts[min(node, len(counts) - 1)]  # SLURM_NTASKS_PER_NODE is a single number for all nodes


# In order of precedence.
_SOURCES = (from_horovod, from_mpi, from_tf_config, from_slurm, from_kubernetes, from_torchrun)
_ALLOCATORS = ("Slurm", "Kubernetes")


def detect_cluster(env: Environment) -> Cluster:
    """Returns the rank and size that the first launcher in order of precedence set, with addresses from any of them.

    Raises:
      InputError: launchers disagree about this process's rank or the job's size.
    """
    clusters = [c for source in _SOURCES if (c := source(env))]
    # If a scheduler's tasks run a launcher (srun torchrun; mpirun, whose daemons srun starts), the launcher starts the
    # processes. A launcher with one process, such as an interactive shell in a Slurm step, is ignored.
    launcher_size = max((c.size for c in clusters if c.source not in (*_ALLOCATORS, "TF_CONFIG")), default=0)
    clusters = [c for c in clusters if c.source not in _ALLOCATORS or c.size >= launcher_size]
    candidates = [c for c in clusters if c.size > 1 or c.source in HOROVOD_LAUNCHERS]
    if not candidates:
        return clusters[0] if clusters else Cluster()
    cluster = candidates[0]
    for other_cluster in candidates[1:]:
        if (other_cluster.rank, other_cluster.size) != (cluster.rank, cluster.size):
            raise InputError(
                "All environment variables must give this process the same rank and size. Received: "
                f"{describe(cluster)}; {describe(other_cluster)}. Unset the variables of the wrong launcher."
            )
    addresses = next((c.addresses for c in candidates if c.addresses), ())
    coordinator = next((c.coordinator for c in candidates if c.coordinator), "")
    return dataclasses.replace(cluster, addresses=addresses, coordinator=coordinator)


def describe(cluster: Cluster) -> str:
    """Returns a phrase with the rank, the size and the launcher of this process."""
    if cluster == Cluster():
        return "this is a single process"
    return f"{cluster.source} says that this is rank {cluster.rank} of {cluster.size}"


def multi_process_hint(env: Environment) -> str:
    """Returns a hint if the environment is that of several processes, but this one was started alone; empty otherwise."""
    if env.get("SLURM_NTASKS", "1") != "1" and from_slurm(env) is None:
        return f" (Slurm's allocation has {env['SLURM_NTASKS']} tasks, but srun did not start this process)"
    if "JOB_COMPLETION_INDEX" in env and "TFDIST_PROCESSES" not in env:
        return " (a Kubernetes indexed Job without TFDIST_PROCESSES: its pods are treated as independent runs)"
    return ""
