"""Several processes that speak Horovod's ring all-reduce. Horovod's operations only: its Keras wrappers reduce nothing."""

import dataclasses
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster import Cluster
from tfdist.devices import share_cores, use_one_gpu
from tfdist.errors import InputError
from tfdist.group import Group
from tfdist.strategy import HasCollectives

try:
    import horovod.tensorflow as hvd
except ImportError as missing:
    raise InputError(
        f"--strategy=horovod needs Horovod built for this TensorFlow. Received: {missing}. "
        "Run `python -m tfdist.install_horovod`."
    ) from missing

from tfdist.collectives.horovod import HorovodCollectives
from tfdist.horovod_rendezvous import serve_and_describe

SETTINGS = {
    # Fusion by time of arrival changes the order of summation from run to run; our buckets are fixed.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Milliseconds between looks at the queue: the default of 1 adds its half to every message, 0.1 busies a third of a core.
    "HOROVOD_CYCLE_TIME": "0.5",
}


class Horovod(HasCollectives):
    """One replica a process; variables are ordinary ones, made equal by a broadcast from rank 0."""

    name = "horovod"

    def __init__(self, *, cluster: Cluster, join: Callable[[Cluster], Group], intra_op_threads: int = 0):
        """Args: intra_op_threads: threads for one operation; 0 for a share of the cores, and to keep to it."""
        share_cores(cluster, intra_op_threads)
        use_one_gpu(cluster.local_rank)
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        if "HOROVOD_RANK" in os.environ or cluster.source == "MPI":
            hvd.init()
            self.group = join(_with_coordinator(cluster))
        else:  # any other cluster: the group tells everyone where rank 0 serves Horovod's rendezvous
            self.group = join(cluster)
            os.environ.update(serve_and_describe(cluster, self.group))
            hvd.init()
        self.cluster = cluster
        self.replicas = hvd.size()
        self.local_replicas = range(hvd.rank(), hvd.rank() + 1)
        self.collectives = HorovodCollectives()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """See base class."""
        return self.in_replica(function)(*args)

    def local(self, value: Any) -> list[Any]:
        """See base class."""
        return [value]

    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        """See base class."""
        return iter(make_dataset(self.local_replicas, self.replicas))

    def synchronize(self, variables: Sequence[keras.Variable]) -> None:
        """See base class."""
        for i, variable in enumerate(variables):
            variable.assign(hvd.broadcast(tf.convert_to_tensor(variable), 0, name=f"synchronize/{i}"))

    def close(self) -> None:
        """See base class."""
        hvd.shutdown()


def _with_coordinator(cluster: Cluster) -> Cluster:
    """Rank 0 chooses a port for the group; Horovod, which is up, carries the address."""
    if cluster.coordinator or cluster.size == 1:
        return cluster
    host = "127.0.0.1" if cluster.local_size == cluster.size else socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{host}:{probe.getsockname()[1]}"
    return dataclasses.replace(cluster, coordinator=hvd.broadcast_object(address, 0, name="group_address"))


STRATEGY = Horovod
