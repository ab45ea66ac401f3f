"""The most memory that this process has used so far: on the host, and on its devices."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory() -> dict[str, int]:
    """Returns the memory fields of a training record; `device_peak_memory_bytes` only where there is a device."""
    fields = {"peak_memory_bytes": host_peak_bytes()}
    device = device_peak_bytes()
    if device is not None:
        fields["device_peak_memory_bytes"] = device
    return fields


def host_peak_bytes() -> int:
    """Returns the largest resident set that this process ever had, in bytes."""
    # Linux hands `ru_maxrss` down through fork and exec: a launcher's size would be its ranks'. VmHWM is our own.
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes() -> int | None:
    """Returns the most that TensorFlow ever had allocated on one GPU of this process, in bytes; None without a GPU."""
    # Initialises TensorFlow's devices, which a run has done long before.
    import tensorflow as tf

    peaks = [
        int(tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))["peak"])
        for gpu in tf.config.list_logical_devices("GPU")
    ]
    return max(peaks, default=None)
