"""Measures the peak memory of this process, on the host and on its devices."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory() -> dict[str, int]:
    """Returns the memory fields of a training record; `device_peak_memory_bytes` only with a GPU."""
    fields = {"peak_memory_bytes": host_peak_bytes()}
    device = device_peak_bytes()
    if device is not None:
        fields["device_peak_memory_bytes"] = device
    return fields


def host_peak_bytes() -> int:
    """Returns the peak resident set size of this process in bytes."""
    # On Linux, `ru_maxrss` is inherited through fork and exec, so that it would include the launcher's. VmHWM is not.
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes() -> int | None:
    """Returns the largest peak of TensorFlow's allocations on a GPU of this process, in bytes; None without a GPU."""
    # Initializes TensorFlow's devices, which a run has done long before.
    import tensorflow as tf

    peaks = [
        int(tf.config.experimental.get_memory_info(gpu.name.removeprefix("/device:"))["peak"])
        for gpu in tf.config.list_logical_devices("GPU")
    ]
    return max(peaks, default=None)
