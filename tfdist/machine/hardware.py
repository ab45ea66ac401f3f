"""Cores, memory and disk that this process may use, within the limits of its container."""

import math
import os
import pathlib
import shutil
from typing import Any

import psutil

from tfdist.cluster.affinity import cpu_quota
from tfdist.errors.numbers import byte_size
from tfdist.machine.limits import container_limit
from tfdist.machine.report import Finding, Section, Status, one_of

_MEMORY_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")  # cgroup v2
_SHARED_MEMORY = "/dev/shm"
_MIN_FREE_MEMORY = 2 << 30  # a process with TensorFlow takes 0.5 GiB before it has a model
_MIN_FREE_SHARED_MEMORY = 128 << 20  # containers have 64 MiB by default
_MIN_FREE_DISK = 1 << 30


def section() -> Section:
    """Returns the resources of this machine, and the amounts that this process may use."""
    usable, quota = len(os.sched_getaffinity(0)), cpu_quota()
    memory, limit = psutil.virtual_memory(), container_limit(_MEMORY_LIMIT)
    free = min(memory.available, limit or memory.available)
    directory = os.getcwd()
    disk, shared = _disk_space(directory), _disk_space(_SHARED_MEMORY)
    facts = {
        "cpu": {
            "cores": os.cpu_count(),
            "usable_cores": usable,
            "quota_cores": quota if math.isfinite(quota) else None,
        },
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available, "limit_bytes": limit},
        "shared_memory": shared,
        "working_directory": disk,
    }
    cores = f"{os.cpu_count()} cores, of which this process may use {usable}"
    cores += f", with a CPU quota of {quota:g} cores" if math.isfinite(quota) else ""
    memory_text = f"{byte_size(memory.total)} of memory, {byte_size(memory.available)} free"
    memory_text += f"; the container may use {byte_size(limit)}" if limit else ""
    low_memory = (
        f"only {byte_size(free)} of memory are free: a process with TensorFlow takes 0.5 GiB before it has a model"
    )
    findings = [
        Finding(Status.OK, cores),
        one_of(
            low_memory if free < _MIN_FREE_MEMORY else "",
            "End other programs, or raise the container's limit.",
            memory_text,
        ),
        _space_finding(shared, _MIN_FREE_SHARED_MEMORY, "Free space there, or start the container with --shm-size=1g."),
        _space_finding(disk, _MIN_FREE_DISK, "Free space there, or pass an --output_dir elsewhere."),
    ]
    return Section("machine", facts, findings)


def _disk_space(path: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": path,
        "total_bytes": None,
        "free_bytes": None,
        "is_writable": os.access(path, os.W_OK),
    }
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return facts
    return facts | {"total_bytes": usage.total, "free_bytes": usage.free}


def _space_finding(facts: dict[str, Any], minimum: int, remedy: str) -> Finding:
    path, free = facts["path"], facts["free_bytes"]
    if free is None or not facts["is_writable"]:
        return Finding(
            Status.WARNING, f"{path} cannot be written", f"Make {path} a directory that this user may write."
        )
    problem = f"only {byte_size(free)} are free in {path}" if free < minimum else ""
    return one_of(problem, remedy, f"{byte_size(free)} free in {path}")
