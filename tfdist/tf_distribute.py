"""A `Strategy` on any strategy of tf.distribute: mirrored, multiworker and TPU are this class with another engine."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster import Cluster
from tfdist.collectives.replica_context import ReplicaContextCollectives
from tfdist.group import Group
from tfdist.strategy import HasCollectives


class TensorFlowStrategy(HasCollectives):
    """Runs replica functions with an engine of tf.distribute, which mirrors the variables born in its scope."""

    def __init__(
        self,
        name: str,
        engine: tf.distribute.Strategy,
        *,
        cluster: Cluster,
        group: Group,
        options: tf.distribute.experimental.CommunicationOptions | None = None,
    ):
        """Args: name: as in `--strategy`; engine: of tf.distribute; options: passed to the engine's collectives."""
        self.name = name
        self.engine = engine
        self.cluster = cluster
        self.group = group
        self.replicas = engine.num_replicas_in_sync
        local = self.replicas // cluster.size
        self.local_replicas = range(cluster.rank * local, (cluster.rank + 1) * local)
        self.collectives = ReplicaContextCollectives(self.replicas, options)

    def _placement(self) -> contextlib.AbstractContextManager:
        """See base class."""
        return self.engine.scope()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """See base class."""
        return self.engine.run(self.in_replica(function), args)

    def local(self, value: Any) -> list[Any]:
        """See base class."""
        return list(self.engine.experimental_local_results(value))

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """See base class; the optimizer must not sum over replicas what is whole already."""
        keras_internals.switch_off_second_sum(optimizer)
        super().apply(optimizer, gradients, variables)

    def owns(self, variable: keras.Variable) -> bool:
        """See base class."""
        return bool(self.engine.extended.variable_created_in_scope(variable.value))

    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        """See base class."""
        dataset = make_dataset(self.local_replicas, self.replicas)
        with keras_internals.untuned_device_iterators():
            return iter(self.engine.distribute_datasets_from_function(lambda _: dataset))
