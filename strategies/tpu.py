"""The cores of a TPU: tf.distribute's TPUStrategy."""

from collections.abc import Callable

import tensorflow as tf

from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group
from tfdist.distribution.tf_distribute import TensorFlowStrategy
from tfdist.errors import InputError


class TPU(TensorFlowStrategy):
    """Replicas on the cores of one TPU or slice."""

    compiles_replicas = True

    def __init__(self, *, cluster: Cluster, join: Callable[[Cluster], Group], tpu: str = ""):
        """Connects to the TPU with this name or grpc:// address, or "local" on a TPU VM."""
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
            raise InputError(
                f"--strategy=tpu requires a TPU that can be reached. Received: --tpu={tpu or '(none)'}: "
                f"{str(error).strip().splitlines()[0]} Specify one with --tpu=NAME (`local` on a TPU VM)."
            ) from error
        super().__init__("tpu", tf.distribute.TPUStrategy(resolver), cluster=cluster, group=join(cluster))


STRATEGY = TPU
