"""Which cores of a host a process keeps to. Processes that share them all push each other around: a collective is as slow
as the rank that was interrupted last.
"""

import contextlib
import os
import pathlib

TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")
_OWN: dict[frozenset[int], int] = {}  # the cores that this process bound itself to, and what it returned then


def keep_to_share(local_rank: int, local_size: int, *, dealt: bool = False) -> int:
    """Keeps this process, and the threads that it starts from now on, to its share of the host's cores.

    Binds nothing where somebody has chosen cores before (mpirun, Slurm, taskset, a container), where there are fewer cores
    than processes, or where the system forbids it. A second call changes nothing.

    Args:
      local_rank: of this process among those of the host.
      local_size: how many of the job's processes are on the host.
      dealt: whether a choice made before was made for this process alone, not for all of the job on this host.

    Returns:
      How many cores each process of the host has, at least 1: the same for all, as threads can round differently.
    """
    available = frozenset(os.sched_getaffinity(0))
    if available in _OWN:
        return _OWN[available]
    chosen_before = len(available) != os.cpu_count()
    if chosen_before and dealt:
        return len(available)
    each = max(1, len(available) // local_size)
    if not chosen_before and local_size <= len(available):
        own = frozenset(share(sorted(available, key=_place), local_rank, local_size))
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, own)
            _OWN[own] = each
    return each


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
