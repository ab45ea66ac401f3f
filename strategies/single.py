"""One process with one replica, without tf.distribute: the reference for all other strategies."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.environment import Cluster
from tfdist.collectives import OneReplica
from tfdist.coordination import Group
from tfdist.distribution.strategy import LossFunction, LossGradients, Strategy, Variables
from tfdist.parameter_server.embedding_tables import LocalRows


class Single(Strategy):
    """Runs a replica function by calling it."""

    name = "single"
    replicas = 1
    local_replicas = range(1)
    supports_dynamic_embeddings = True

    def __init__(self, *, cluster: Cluster, join: Callable[[Cluster], Group]):
        self.cluster = cluster
        self.group = join(cluster)
        self.collectives = OneReplica()
        self.optimizer_shards = self._keyed_rows = LocalRows(self)

    def gradients(self, loss_fn: LossFunction, variables: Variables, *batch: Any) -> LossGradients:
        with self._keyed_rows.rows_in_step(variables, *batch):
            return super().gradients(loss_fn, variables, *batch)

    def gradient_shape(self, variable: keras.Variable) -> tf.TensorShape:
        """See base class. The number of distinct keys differs between batches."""
        return self._keyed_rows.gradient_shape(variable)


STRATEGY = Single
