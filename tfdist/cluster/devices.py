"""The devices of this process: GPUs, logical CPU devices, and threads."""

import contextlib
import os

import tensorflow as tf

from tfdist.cluster.affinity import bind_to_share
from tfdist.cluster.environment import Cluster
from tfdist.errors import InputError

BINDING_LAUNCHERS = ("MPI", "Slurm")  # bind each process separately, if at all
# Replicas are traced sequentially: on two cores, a small MLP starts in 20 to 40 s on 32 devices, and in 30 to 100 s on 64.
_MAX_LOGICAL_CPUS = 32


def local_device_names(count: int) -> list[str]:
    """Returns the names of the devices for this process's replicas: GPUs if there are any, else logical CPU devices.

    With a count of 0, returns all GPUs, or one CPU.

    Raises:
      InputError: there are fewer devices, or TensorFlow was already initialized with fewer logical CPU devices.
    """
    check_available(count)
    if gpus := tf.config.list_physical_devices("GPU"):
        return [f"GPU:{i}" for i in range(count or len(gpus))]
    count = max(count, 1)
    [cpu, *_] = tf.config.list_physical_devices("CPU")
    devices = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(devices) < count:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
            add_inter_op_threads(count)
        except (RuntimeError, ValueError):
            raise InputError(
                f"Logical CPU devices are created when TensorFlow starts. Received: devices={count}, after "
                f"TensorFlow has started with {len(devices)}. Load the strategy before anything else uses TensorFlow, "
                "including tfdist.data.load."
            ) from None
    return [f"CPU:{i}" for i in range(count)]


def check_available(count: int) -> None:
    """Raises `InputError` if there are fewer devices: GPUs if there are any, else logical CPU devices."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and count > len(gpus):
        raise InputError(
            f"--devices must be at most this machine's number of GPUs. Received: {count}, with {len(gpus)} GPUs. Use fewer."
        )
    if not gpus and count > _MAX_LOGICAL_CPUS:
        raise InputError(
            f"Without GPUs, a process has at most {_MAX_LOGICAL_CPUS} logical CPU devices, which share its cores. Received: "
            f"{count} devices. Use fewer, or tfdist layout, which describes larger meshes without any devices."
        )


def share_cores(cluster: Cluster, intra_op_threads: int = 0) -> None:
    """Divides this host's cores between the job's processes on it, if there are several.

    If `intra_op_threads` is 0, uses as many threads as this process has cores, and binds the process to its cores if
    possible.
    """
    threads = intra_op_threads
    if not threads and cluster.local_size > 1:
        threads = bind_to_share(cluster.local_rank, cluster.local_size, assigned=cluster.source in BINDING_LAUNCHERS)
    limit_threads(threads)
    if threads and not tf.config.threading.get_inter_op_parallelism_threads():
        with contextlib.suppress(RuntimeError):  # the program has started TensorFlow with this number of threads
            add_inter_op_threads(1)


def limit_threads(count: int) -> None:
    """Limits the number of threads within an operation, unless `count` is 0."""
    if count:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(count)
        except RuntimeError:
            raise InputError(
                "The number of threads is fixed when TensorFlow first runs an operation. Received: a strategy "
                "created after that. Load the strategy first, before anything else, including tfdist.data.load."
            ) from None


def add_inter_op_threads(count: int) -> None:
    """Adds inter-op threads for operations that block while they wait for other operations.

    For example, a `tf.py_function` that calls a `tf.function` occupies a thread until the call returns. On several replicas,
    or in a process bound to one core, such calls could occupy all threads.
    """
    threads = tf.config.threading.get_inter_op_parallelism_threads() or len(os.sched_getaffinity(0))
    tf.config.threading.set_inter_op_parallelism_threads(threads + count)


def use_one_gpu(local_rank: int) -> None:
    """Makes only the local rank's GPU visible, if there are GPUs, and enables memory growth."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    if len(gpus) == 1:  # the scheduler has already assigned each process its own GPU
        local_rank = 0
    if local_rank >= len(gpus):
        raise InputError(
            f"Each process on a host needs its own GPU. Received: local rank {local_rank}, with {len(gpus)} GPUs. "
            f"Start at most {len(gpus)} processes on this host."
        )
    tf.config.set_visible_devices(gpus[local_rank], "GPU")
    tf.config.experimental.set_memory_growth(gpus[local_rank], True)
