"""Several processes that speak TensorFlow's own collectives: tf.distribute's MultiWorkerMirroredStrategy."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist.cluster.devices import share_cores
from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group
from tfdist.distribution.tf_distribute import TensorFlowStrategy
from tfdist.distribution.tf_server import starting, with_addresses
from tfdist.distribution.variable_creation import VariableCreation


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
        cluster = with_addresses(cluster, group)
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation[communication.upper()]
        )
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
            task_type="worker",
            task_id=cluster.rank,
            rpc_layer="grpc",
        )
        with starting(group, cluster.size, start_timeout_seconds):
            engine = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        super().__init__("multiworker", engine, cluster=cluster, group=group, options=options)
        self._variable_creation = VariableCreation(group)

    @contextlib.contextmanager
    def _placement(self) -> Iterator[None]:
        """See base class."""
        with super()._placement(), tf.variable_creator_scope(self._variable_creation.agree):
            yield


STRATEGY = MultiWorker
