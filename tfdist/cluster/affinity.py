"""CPU affinity: binds each process of a host to its own cores.

Processes that share cores interrupt each other, and a collective is as slow as the rank that was interrupted last.
"""

import contextlib
import math
import os
import pathlib

TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")
QUOTA = pathlib.Path(
    "/sys/fs/cgroup/cpu.max"
)  # in version 2 of control groups: microseconds per period, and the period
_BOUND: dict[frozenset[int], int] = {}  # cores that this process has bound itself to, and the value returned then


def bind_to_share(local_rank: int, local_size: int, *, assigned: bool = False) -> int:
    """Binds this process, and the threads that it starts later, to its share of the host's cores.

    Does nothing if the affinity has been set before (by mpirun, Slurm, taskset, a container), if there are fewer cores than
    processes, or if the system forbids it. A second call has no effect.

    Args:
      local_rank: rank of this process on its host.
      local_size: number of processes of the job on this host.
      assigned: whether an earlier affinity is that of this process only, instead of all processes of the job on this host.

    Returns:
      Number of cores per process of the host, at least 1; the same for all, because the number of threads can affect
        rounding.
    """
    available = frozenset(os.sched_getaffinity(0))
    cores = cores_per_process(local_size, assigned=assigned)
    if available not in _BOUND and len(available) == os.cpu_count() and local_size <= len(available):
        bound = frozenset(share(sorted(available, key=_sort_key), local_rank, local_size))
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, bound)
            _BOUND[bound] = cores
    return cores


def cores_per_process(local_size: int, *, assigned: bool = False) -> int:
    """Returns the number of cores per process of the host, at least 1; see `bind_to_share`, which may precede it."""
    available = frozenset(os.sched_getaffinity(0))
    if available in _BOUND:
        return _BOUND[available]
    if assigned and len(available) != os.cpu_count():
        return len(available)
    return max(1, len(available) // local_size)


def cpu_quota() -> float:
    """Returns the CPU quota of this process's container, in cores; infinite if it is not limited, or unknown."""
    try:
        quota, period = QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max" instead of a number, or another version of control groups
        return math.inf


def share(cores: list[int], local_rank: int, local_size: int) -> list[int]:
    """Returns a contiguous part of the cores, disjoint from the parts of the other ranks."""
    first, end = (rank * len(cores) // local_size for rank in (local_rank, local_rank + 1))
    return cores[first:end]


def _sort_key(core: int) -> tuple[int, ...]:
    """Returns a sort key that groups cores by socket and physical core; by number if the topology is unknown."""
    topology = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return (*(int((topology / name).read_text()) for name in ("physical_package_id", "core_id")), core)
    except (OSError, ValueError):
        return (0, core, core)
