"""Several processes that speak TensorFlow's own collectives: tf.distribute's MultiWorkerMirroredStrategy."""

import dataclasses
import socket
from collections.abc import Callable

import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster import Cluster
from tfdist.devices import share_cores
from tfdist.endings import sigterm_ends
from tfdist.errors import InputError, PeerLostError
from tfdist.group import Group
from tfdist.group.watching import NEWS_SECONDS
from tfdist.tf_distribute import TensorFlowStrategy


class MultiWorker(TensorFlowStrategy):
    """Replicas on the devices of every process of the cluster; one CPU replica a process where there are no GPUs."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        communication: str = "auto",
        intra_op_threads: int = 0,
        start_timeout_seconds: float = 120.0,
    ):
        """Starts TensorFlow's server of this process, and waits for those of the others.

        Args:
          cluster: this process among the job's.
          join: joins the job's group.
          communication: the engine's implementation, "auto", "ring" or "nccl".
          intra_op_threads: of one operation; 0 for a share of the cores, and to keep to it.
          start_timeout_seconds: how long to wait for the other servers, once all processes have come.
        """
        share_cores(cluster, intra_op_threads)
        group = join(cluster)
        cluster = _with_addresses(cluster, group)
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation[communication.upper()]
        )
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
            task_type="worker",
            task_id=cluster.rank,
            rpc_layer="grpc",
        )
        keras_internals.limit_start_of_workers(cluster.size, start_timeout_seconds)
        try:
            with sigterm_ends():
                engine = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        except tf.errors.DeadlineExceededError as error:
            loss = group.lost(NEWS_SECONDS)  # no thread could hear of it meanwhile
            late = f"Not every rank's TensorFlow server was up within {start_timeout_seconds:g} s"
            raise PeerLostError(f"{loss or late}.") from error
        super().__init__("multiworker", engine, cluster=cluster, group=group, options=options)


def _with_addresses(cluster: Cluster, group: Group) -> Cluster:
    """Checks that this process's port is free, or chooses one and tells the others where the environment names none."""
    if cluster.addresses:
        _check_free(cluster.addresses[cluster.rank])
        # The engine would wait to its deadline, and nothing could interrupt it, for a process that has found its port taken.
        group.barrier("multiworker/ports")
        return cluster
    host = "127.0.0.1" if cluster.local_size == cluster.size else socket.gethostname()
    addresses = group.gather("multiworker/addresses", f"{host}:{_free_port()}")
    return dataclasses.replace(cluster, addresses=tuple(addresses))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _check_free(address: str) -> None:
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine does
        try:
            probe.bind(("", port))
        except OSError as error:
            raise InputError(
                f"This process's TensorFlow server needs a free port. Received: {address}, which is in use ({error.strerror}). "
                "End the process that has it, or choose another port in TF_CONFIG on every process."
            ) from error


STRATEGY = MultiWorker
