"""One process with several devices, on which variables are mirrored: tf.distribute's MirroredStrategy."""

from collections.abc import Callable

import tensorflow as tf

from tfdist.cluster.devices import local_device_names
from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group
from tfdist.distribution.all_reduce_plan import plan_all_reduce
from tfdist.distribution.tf_distribute import TensorFlowStrategy


class Mirrored(TensorFlowStrategy):
    """Replicas on this machine's GPUs, or on logical CPU devices if there is none."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        devices: int = 0,
        all_reduce: str = "engine",
        topology: str = "",
    ):
        """Creates the engine. Options are those of the flags; without `devices`, all GPUs are used, or one CPU device."""
        names = local_device_names(devices)
        # On logical CPUs, the engine's default uses group keys that are global to the process: a second strategy of
        # another size breaks all later collectives. Reduction to one device has no such keys.
        reduction = tf.distribute.ReductionToOneDevice() if names[0].startswith("CPU") else None
        engine = tf.distribute.MirroredStrategy(names, cross_device_ops=reduction)
        super().__init__("mirrored", engine, cluster=cluster, group=join(cluster))
        plan = plan_all_reduce(all_reduce, topology, self.group, cluster, self.replicas)
        self.tuned_collectives = plan.tune(self.collectives)


STRATEGY = Mirrored
