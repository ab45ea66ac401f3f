"""Describes the environment of a run, for environment.json."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence

from tfdist.coordination import Json

_PACKAGES = ("tfdist", "tensorflow", "keras", "horovod", "numpy")


def describe(hosts: Sequence[str], started: float, communication: str = "") -> dict[str, Json]:
    """Returns what is needed to repeat a run: versions, hosts, command and machine.

    Neither imports packages nor reads environment variables, which may contain secrets.

    Args:
      hosts: host name of each rank, by rank.
      started: start time of the run, in seconds since 1970 (UTC).
      communication: see `Strategy.communication`.
    """
    return {
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(timespec="seconds"),
        "hosts": list(hosts),
        "communication": communication,
        "versions": versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of installed packages that may affect results, by name."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
