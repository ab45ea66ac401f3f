"""Several processes with TensorFlow's own collectives: tf.distribute's MultiWorkerMirroredStrategy."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.devices import share_cores
from tfdist.cluster.environment import Cluster
from tfdist.collectives import Collectives
from tfdist.collectives.process_groups import ProcessGroups, distinct_groups
from tfdist.coordination import Group
from tfdist.distribution.all_reduce_plan import plan_all_reduce
from tfdist.distribution.sharded_optimizer import optimizer_shards
from tfdist.distribution.tf_distribute import TensorFlowStrategy, consistent_variable_creator
from tfdist.distribution.tf_server import wait_for_servers, with_addresses


class MultiWorker(TensorFlowStrategy):
    """Replicas on the devices of every process of the cluster; one CPU replica per process if there are no GPUs."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        communication: str = "auto",
        intra_op_threads: int = 0,
        start_timeout_seconds: float = 120.0,
        groups: Sequence[Sequence[int]] = (),
        all_reduce: str = "engine",
        topology: str = "",
        shard: str = "none",
    ):
        """Starts this process's TensorFlow server and waits for the servers of the other processes.

        `groups` are the sets of ranks that will communicate, including pairs that exchange messages. They must be the same on
        every process, and they require one replica per process. The groups that the `all_reduce` algorithm needs are added.
        Other options are those of the flags. After all have joined, waits up to `start_timeout_seconds` for their servers.
        """
        share_cores(cluster, intra_op_threads)
        group = join(cluster)
        plan = plan_all_reduce(all_reduce, topology, group, cluster)
        sets = distinct_groups([*groups, *plan.groups], cluster.size)
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
        with wait_for_servers(group, cluster.size, start_timeout_seconds):
            engine = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        keras_internals.broadcast_initial_values_of_any_dtype(engine)
        local_replicas = engine.num_replicas_in_sync // cluster.size
        make_group = (
            ProcessGroups(sets, cluster.size, local_replicas, options).collectives if cluster.size > 1 else None
        )
        super().__init__("multiworker", engine, cluster=cluster, group=group, options=options, make_group=make_group)
        self._make_process_group = make_group
        self.tuned_collectives = plan.tune(self.collectives)
        self.optimizer_shards = optimizer_shards(shard, self)
        self._variable_creation = consistent_variable_creator(group)

    @functools.cached_property
    def process_collectives(self) -> Collectives:
        if self._make_process_group is None:
            return self.collectives
        return self._make_process_group(tuple(range(self.cluster.size)), self.cluster.rank)

    def process_device(self) -> contextlib.AbstractContextManager:
        """See base class. Without it, TensorFlow may place operations on another process."""
        kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
        return tf.device(f"/job:worker/replica:0/task:{self.cluster.rank}/device:{kind}:0")

    @contextlib.contextmanager
    def _placement(self) -> Iterator[None]:
        with super()._placement(), tf.variable_creator_scope(self._variable_creation):
            yield


STRATEGY = MultiWorker
