"""Limits of the system for this process: open files, processes, locked memory."""

import pathlib
import resource

from tfdist.errors.numbers import byte_size
from tfdist.machine.report import Section, one_of

_PROCESS_LIMIT = pathlib.Path("/sys/fs/cgroup/pids.max")
_INFINIBAND = pathlib.Path("/dev/infiniband")
_MIN_FILES = 1024
_MIN_PROCESSES = 1024  # including threads; a process with TensorFlow has dozens
_KINDS = {
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
}


def section() -> Section:
    """Returns the limits; a small one is a warning."""
    facts = {
        name: dict(zip(("soft", "hard"), map(_known, resource.getrlimit(kind)), strict=True))
        for name, kind in _KINDS.items()
    }
    files, processes, locked = (limits["soft"] for limits in facts.values())
    container = container_limit(_PROCESS_LIMIT)
    lowest = min((limit for limit in (processes, container) if limit is not None), default=None)
    pinned = "InfiniBand needs locked memory without a limit" if _INFINIBAND.exists() and locked is not None else ""
    findings = [
        one_of(
            f"only {files} files may be open" if _is_below(files, _MIN_FILES) else "",
            "ulimit -n 65536",
            f"{_text(files)} open files",
        ),
        one_of(
            f"only {lowest} processes and threads" if _is_below(lowest, _MIN_PROCESSES) else "",
            "ulimit -u 16384, or raise the container's limit (docker run --pids-limit)",
            f"{_text(lowest)} processes and threads",
        ),
        one_of(
            pinned, "ulimit -l unlimited", f"{'unlimited' if locked is None else byte_size(locked)} of locked memory"
        ),
    ]
    return Section("limits", {**facts, "container_processes": container}, findings)


def _known(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def container_limit(path: pathlib.Path) -> int | None:
    """Returns a limit of this process's container from a file of cgroup v2; None if unlimited or unknown."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" instead of a number, or no cgroup v2
        return None


def _is_below(limit: int | None, minimum: int) -> bool:
    return limit is not None and limit < minimum


def _text(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)
