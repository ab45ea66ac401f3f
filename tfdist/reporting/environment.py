"""What a run ran on: environment.json."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence

from tfdist.coordination import Json

_PACKAGES = ("tfdist", "tensorflow", "keras", "horovod", "numpy")


def describe(hosts: Sequence[str], started: float) -> dict[str, Json]:
    """Returns what one must know to run the same again: versions, hosts, command and machine.

    Nothing is imported for it, and no environment variable is read: those hold secrets.

    Args:
      hosts: the host name of each rank, by rank.
      started: when the run began, in seconds since 1970 (UTC).
    """
    return {
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(timespec="seconds"),
        "hosts": list(hosts),
        "versions": versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Returns the version of Python and of each installed package that a result depends on, by name."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
