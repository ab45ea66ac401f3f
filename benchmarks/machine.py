"""Where and with what a measurement was made: the first line of its raw file."""

import importlib.metadata
import os
import pathlib
import platform
import sys
import time
from typing import Any

PACKAGES = ("tfdist", "tensorflow", "keras", "horovod", "numpy")


def description(peers: pathlib.Path) -> dict[str, Any]:
    """The date, the machine, its load and link, the command and the versions.

    Args:
      peers: the Python of the environment that has PyTorch; it may be absent.
    """
    versions = {name: found.version for name in PACKAGES for found in importlib.metadata.distributions(name=name)}
    folders = [str(path) for path in peers.parent.parent.glob("lib/python*/site-packages")]
    for torch in importlib.metadata.distributions(name="torch", path=folders):
        versions["torch"] = torch.version
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv),
        "link": link(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def link() -> str:
    """The loopback's rate as `slow_link.sh` set it."""
    return os.environ.get("SLOW_LINK", "full speed")


def _processor() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
