"""Number of processes of a control group that the kernel has killed for lack of memory."""

import pathlib
import re

_ROOT = pathlib.Path("/sys/fs/cgroup")
_MEMBERSHIP = pathlib.Path("/proc/self/cgroup")


def out_of_memory_kills() -> int:
    """Returns how many processes of this process's control group the kernel has killed because there was no memory.

    The processes that this one starts are in its group, unless something moves them. With version 2 of control groups, the
    groups below it count as well.

    Returns:
      The number since the group was created; 0 where the system does not count.
    """
    for counter in _counters():
        try:
            return int(re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)[1])  # type: ignore[index]
        except (OSError, TypeError):  # no such file, or an older kernel
            continue
    return 0


def _counters() -> list[pathlib.Path]:
    """Returns the files that may have the number; the group's own path is not visible in every container."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if "memory" in controllers.split(","):
            root, name = _ROOT / "memory", "memory.oom_control"
        elif not controllers:
            root, name = _ROOT, "memory.events"
        else:
            continue
        found += [root / path.lstrip("/") / name, root / name]
    return found
