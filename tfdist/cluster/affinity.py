"""CPU affinity: binds each process of a host to its own cores.

Processes that share cores interrupt each other, and a collective is as slow as its slowest rank.
"""

import contextlib
import math
import os
import pathlib

TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")
QUOTA = pathlib.Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: the quota and the period, in microseconds
# Results of `bind_to_share`, by the cores to which it bound this process.
_CORES_BY_BINDING: dict[frozenset[int], int] = {}


def bind_to_share(local_rank: int, local_size: int, *, assigned: bool = False) -> int:
    """Binds this process, and the threads that it starts later, to its share of the host's cores.

    Has no effect if the affinity is already set (by mpirun, Slurm, taskset, a container or an earlier call), if there are
    fewer cores than processes, or if the system does not permit it.

    Args:
      local_rank: rank of this process on its host.
      local_size: number of processes of the job on this host.
      assigned: whether an existing affinity was set for this process only, not for all the job's processes on this host.

    Returns:
      Number of cores per process, at least 1; equal for all processes, because the number of threads can affect rounding.
    """
    available = frozenset(os.sched_getaffinity(0))
    cores = cores_per_process(local_size, assigned=assigned)
    if available not in _CORES_BY_BINDING and len(available) == os.cpu_count() and local_size <= len(available):
        ordered = sorted(available, key=_sort_key)
        start, end = (rank * len(ordered) // local_size for rank in (local_rank, local_rank + 1))
        binding = frozenset(ordered[start:end])
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, binding)
            _CORES_BY_BINDING[binding] = cores
    return cores


def cores_per_process(local_size: int, *, assigned: bool = False) -> int:
    """Returns the number of cores per process of the host, at least 1, before or after `bind_to_share`."""
    available = frozenset(os.sched_getaffinity(0))
    if available in _CORES_BY_BINDING:
        return _CORES_BY_BINDING[available]
    if assigned and len(available) != os.cpu_count():
        return len(available)
    return max(1, len(available) // local_size)


def cpu_quota() -> float:
    """Returns the CPU quota of this process's container, in cores; infinite if unlimited or unknown."""
    try:
        quota, period = QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max" instead of a number, or no cgroup v2
        return math.inf


def _sort_key(core: int) -> tuple[int, ...]:
    """Returns a sort key that groups cores by socket and physical core, or by index if the topology is unknown."""
    topology = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return (*(int((topology / name).read_text()) for name in ("physical_package_id", "core_id")), core)
    except (OSError, ValueError):
        return (0, core, core)
