"""Implements `Strategy` on top of tf.distribute, for the strategies mirrored, multiworker and tpu."""

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster, detect_cluster
from tfdist.collectives.device_queues import DeviceGroup, Queues
from tfdist.collectives.interface import assign_from_first
from tfdist.collectives.replica_context import MakeGroup, ReplicaContextCollectives
from tfdist.config.strategy_registry import DECLARATIONS, Processes
from tfdist.coordination import Group, join
from tfdist.coordination.group import long_timeout
from tfdist.distribution.strategy import LossFunction, LossGradients, Strategy, VariableAdoption, Variables
from tfdist.errors import InputError


class TensorFlowStrategy(Strategy):
    """Runs replica functions with a tf.distribute engine, which mirrors variables that are created in its scope."""

    def __init__(
        self,
        name: str,
        engine: tf.distribute.Strategy,
        *,
        cluster: Cluster,
        group: Group,
        options: tf.distribute.experimental.CommunicationOptions | None = None,
        make_group: MakeGroup | None = None,
    ):
        """Wraps an engine, whose collectives have `options`; `make_group` creates groups if there are several processes."""
        keras_internals.enable_float_conversion()
        self.name = name
        self.engine = engine
        self.cluster = cluster
        self.group = group
        self.replicas = engine.num_replicas_in_sync
        local_count = self.replicas // cluster.size
        self.local_replicas = range(cluster.rank * local_count, (cluster.rank + 1) * local_count)
        if make_group is None and cluster.size == 1 and not self.compiles_replicas:
            queues, dtypes = Queues(), ReplicaContextCollectives.dtypes

            def make_group(ranks: tuple[int, ...], rank: int) -> DeviceGroup:
                return DeviceGroup(ranks, ranks.index(rank), dtypes, queues)

        self.collectives = ReplicaContextCollectives(self.replicas, options, make_group)

    @functools.cached_property
    def adoption(self) -> "MirroredVariables":
        return MirroredVariables(self)

    def _placement(self) -> contextlib.AbstractContextManager:
        return self.engine.scope()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.engine.run(self.replica_function(function), args)

    def local(self, value: Any) -> list[Any]:
        return list(self.engine.experimental_local_results(value))

    def per_replica(self, values: Sequence[Any]) -> Any:
        leaves, first = [tf.nest.flatten(value) for value in values], self.local_replicas.start

        def distribute_leaf(i: int) -> Any:
            return self.engine.experimental_distribute_values_from_function(
                lambda context: leaves[context.replica_id_in_sync_group - first][i]
            )

        return tf.nest.pack_sequence_as(values[0], [distribute_leaf(i) for i in range(len(leaves[0]))])

    def gradients(self, loss_fn: LossFunction, variables: Variables, *batch: Any) -> LossGradients:
        for variable in variables:
            keras_internals.watch_copies(self.local(variable.value))
        return super().gradients(loss_fn, variables, *batch)

    def own_copies(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[None]:
        return keras_internals.own_copies(variables)

    def apply_locally(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Variables) -> None:
        with self.own_copies([*variables, *optimizer.variables]), keras_internals.updating_own_copies():
            super().apply_locally(optimizer, gradients, variables)

    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        dataset = make_dataset(self.local_replicas, self.replicas)
        with keras_internals.untuned_device_iterators():
            return iter(self.engine.distribute_datasets_from_function(lambda _: dataset))


class MirroredVariables(VariableAdoption):
    """Adopts variables by recreating their TensorFlow variables in the scope of an engine that mirrors them."""

    _strategy: TensorFlowStrategy

    def __init__(self, strategy: TensorFlowStrategy):
        super().__init__(strategy)
        self._new_keys: dict[str, str] = {}  # old to new optimizer key of each adopted variable

    def owns(self, variable: keras.Variable) -> bool:
        return bool(self._strategy.engine.extended.variable_created_in_scope(variable.value))

    def adopt(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """See base class. Earlier traces still refer to the old TensorFlow variables.

        Raises:
          InputError: a variable belongs to another strategy.
        """
        strategy = self._strategy
        optimizer_ids = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
        for variable in variables:
            if self.owns(variable):
                self._set_access(variable, id(variable) in optimizer_ids)
                continue
            if isinstance(variable.value, tf.distribute.DistributedValues):
                raise InputError(
                    "A model must be trained with the strategy in whose scope it was created. Received: "
                    f"{variable.path}, created under another one. Create the model again."
                )
            old_key = keras_internals.key_of(variable)
            keras_internals.recreate_variable(variable, strategy.scope())
            self._set_access(variable, id(variable) in optimizer_ids)
            self._new_keys[old_key] = keras_internals.key_of(variable)
        for optimizer in optimizers:
            keras_internals.rebind_variables(optimizer, strategy.engine, self._new_keys)

    def _set_access(self, variable: keras.Variable, is_optimizer_variable: bool) -> None:
        keras_internals.watch_copies(self._strategy.local(variable.value))
        keras_internals.read_first_copy_outside(variable)
        if not is_optimizer_variable:
            keras_internals.assign_own_copies(variable)

    @contextlib.contextmanager
    def as_one_device(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        mirrored_variables = [v for v in variables if isinstance(v.value, tf.distribute.DistributedValues)]
        owned_variables = [variable for variable in mirrored_variables if self.owns(variable)]
        with keras_internals.reading_first_copy(
            owned_variables, [self._strategy.local(variable.value) for variable in owned_variables]
        ):
            yield

    def broadcast_values(self, variables: Sequence[keras.Variable]) -> None:
        strategy = self._strategy
        if strategy.cluster.size > 1 and variables:
            assign = functools.partial(assign_from_first, variables, strategy.collectives)
            tf.function(lambda: strategy.run(assign), autograph=False)()


_strategies: dict[tf.distribute.Strategy, TensorFlowStrategy] = {}  # by engine; the job's group is joined only once


def strategy_of_engine(engine: tf.distribute.Strategy, start_timeout_seconds: float) -> TensorFlowStrategy:
    """Returns the `Strategy` for a tf.distribute engine that the program has created; the same object for each call.

    Args:
      engine: a `MirroredStrategy`, `OneDeviceStrategy` or `MultiWorkerMirroredStrategy`.
      start_timeout_seconds: how long to wait for the other processes.

    Raises:
      InputError: the class of the engine is not supported.
    """
    if engine in _strategies:
        return _strategies[engine]
    declaration = next(
        (entry for entry in DECLARATIONS for name in entry.adopts if isinstance(engine, getattr(tf.distribute, name))),
        None,
    )
    if declaration is None:
        raise InputError(
            "A model must be trained under MirroredStrategy, MultiWorkerMirroredStrategy or tfdist's own strategies. "
            f"Received: {type(engine).__name__}. Create it in the scope of one of these."
        )
    cluster = Cluster() if declaration.processes is Processes.ONE else detect_cluster(os.environ)
    group = join(cluster, start_timeout=start_timeout_seconds)
    _strategies[engine] = TensorFlowStrategy(declaration.name, engine, cluster=cluster, group=group)
    return _strategies[engine]


def consistent_variable_creator(group: Group) -> Callable[..., tf.Variable]:
    """Returns a creator for `tf.variable_creator_scope` that checks that all ranks create the same variables.

    The engine creates a variable with rank 0's value. Without the check, a broadcast between different shapes would fail
    without naming the variable, and a rank that creates an additional variable would wait forever. Cost: one small message of
    the group per variable. The creator raises `InputError` if another rank creates a different variable, and `PeerLostError`
    if it creates none.
    """
    numbers, is_agreeing = itertools.count(1), False  # scopes may be nested

    def create(next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        nonlocal is_agreeing
        if is_agreeing:
            return next_creator(**arguments)
        value: Any = arguments.get("initial_value")
        if tf.executing_eagerly() and callable(value):
            value = arguments["initial_value"] = value()
        number = next(numbers)
        type_text = f" {tf.as_dtype(value.dtype).name}{list(value.shape)}" if hasattr(value, "dtype") else ""
        description = f"{strip_counters(str(arguments.get('name')))}{type_text}"
        with long_timeout("its data or its weights") as deadline:
            group.agree(f"variable/{number}", {f"variable number {number}": description}, deadline=deadline)
        is_agreeing = True
        try:
            return next_creator(**arguments)
        finally:
            is_agreeing = False

    return create


def strip_counters(name: str) -> str:
    """Removes the counters that Keras appends to names, which may differ between processes."""
    return re.sub(r"_\d+(?=/|_|$)", "", name)
