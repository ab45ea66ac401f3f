"""Which cores of a host a process keeps to. Processes that share them all push each other around: a collective is as slow
as the rank that was interrupted last.
"""

import os
import pathlib

TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")


def bind_to_share(local_rank: int, local_size: int) -> None:
    """Keeps this process, and the threads that it starts from now on, to its share of the host's cores.

    Does nothing where somebody has chosen cores before (mpirun, Slurm, taskset, a container), or where there are fewer cores
    than processes.

    Args:
      local_rank: of this process among those of the host.
      local_size: how many of the job's processes are on the host.
    """
    available = os.sched_getaffinity(0)
    if len(available) == os.cpu_count() and local_size <= len(available):
        os.sched_setaffinity(0, share(sorted(available, key=_place), local_rank, local_size))


def share(cores: list[int], local_rank: int, local_size: int) -> list[int]:
    """A part of the cores, disjoint from the others' and next to each other in the order given."""
    first, end = (rank * len(cores) // local_size for rank in (local_rank, local_rank + 1))
    return cores[first:end]


def _place(core: int) -> tuple[int, ...]:
    """Sorts cores by socket, and the threads of one core together; by number where the system does not tell."""
    topology = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return (*(int((topology / name).read_text()) for name in ("physical_package_id", "core_id")), core)
    except (OSError, ValueError):
        return (0, core, core)
