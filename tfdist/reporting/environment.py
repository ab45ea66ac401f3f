"""Describes the environment of a run, for environment.json, and measures the peak memory of a process."""

import datetime
import importlib.metadata
import os
import platform
import re
import resource
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.coordination import Json

_PACKAGES = ("tfdist", "tensorflow", "keras", "horovod", "numpy")
_STATUS = Path("/proc/self/status")


def describe(hosts: Sequence[str], start_time: float, communication: str = "") -> dict[str, Json]:
    """Returns what is needed to repeat a run: versions, hosts, command and machine.

    Neither imports packages nor reads environment variables, which may contain secrets. `hosts` has the host name of each
    rank; `start_time` is in seconds since 1970 (UTC); for `communication`, see `Strategy.communication`.
    """
    return {
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "started": datetime.datetime.fromtimestamp(start_time, datetime.UTC).isoformat(timespec="seconds"),
        "hosts": list(hosts),
        "communication": communication,
        "versions": versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of installed packages that may affect results, by name."""
    versions_by_name = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions_by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions_by_name


def peak_memory() -> dict[str, int]:
    """Returns the memory fields of a training record; `device_peak_memory_bytes` is the maximum over GPUs, if there are any."""
    # Listing devices initializes them, which a run has already done.
    import tensorflow as tf

    peaks = [
        int(tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))["peak"])
        for gpu in tf.config.list_logical_devices("GPU")
    ]
    return {"peak_memory_bytes": host_peak_bytes()} | ({"device_peak_memory_bytes": max(peaks)} if peaks else {})


def host_peak_bytes() -> int:
    """Returns the peak resident set size of this process in bytes."""
    # `ru_maxrss` is inherited through fork and exec, and would include the launcher's. VmHWM is not, but some kernels lack it.
    match = re.search(r"VmHWM:\s*(\d+)", _STATUS.read_text())
    return 1024 * (int(match[1]) if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
