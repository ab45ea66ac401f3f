"""The `Strategy` contract: where and how a step runs.

The trainer composes these methods and knows nothing else about a strategy. What only some strategies can do is a
separate small interface: `TensorLayouts`, `VariableBlocks`, `VariableAdoption` and `ModelParts`.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.collectives import Collectives, using
from tfdist.collectives.algorithms import TunedCollectives
from tfdist.config.strategy_declaration import Declaration
from tfdist.coordination import Group
from tfdist.data import check_batch_size
from tfdist.data.structures import with_none
from tfdist.distribution.model_parts import ModelParts
from tfdist.distribution.optimizer_shards import OptimizerShards
from tfdist.distribution.tensor_layouts import TensorLayouts
from tfdist.distribution.variable_adoption import VariableAdoption
from tfdist.distribution.variable_blocks import VariableBlocks
from tfdist.errors import InputError


@dataclasses.dataclass(frozen=True)
class State:
    """A variable that a part of the step needs from step to step.

    Attributes:
      name: unique within a run, and the same in every run.
      shape: static shape.
      dtype: element type.
      per_replica: whether each replica has its own value; otherwise all replicas have the same.
      initial: initial value, a number or an array of `shape`; the same on every replica.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    per_replica: bool
    initial: Any = 0


class Strategy:
    """Runs replica functions on the replicas of a job; this process hosts `local_replicas`, by default one.

    Attributes:
      declaration: what a strategy outside of this repository declares; the registry has the others' declarations.
      name: as in `--strategy`.
      cluster: this process in the job.
      group: control plane of the job's processes.
      replicas: number of replicas in the job.
      local_replicas: indices of this process's replicas, in order.
      compiles_replicas: whether replica functions are compiled by XLA: shapes are static, so every replica must get the
        same number of rows, and there is no clock.
      compiles_loops: whether a compiled function may loop over steps and take their batches from an iterator; otherwise
        the host calls each step.
      trains_whole_model: whether each process trains the whole model, and may call it; otherwise it has a part of the
        layers, and activations are sent between processes.
      layouts: layouts of tensors inside replica functions.
      communication: which library its collectives use, and why, as a sentence; empty if there is no choice.
      collectives: collectives of the replicas, which communicate through them inside `run`.
      tuned: collectives of training steps, if their sums do not all use the engine's all-reduce; else None.
      sums_gradients: whether the engine sums the gradients of the global batch by itself, so that `gradients` returns
        the sums: there is nothing left to reduce, to compress or to count, and the engine compiles the whole program.
    """

    declaration: ClassVar[Declaration | None] = None
    name: str
    cluster: Cluster
    group: Group
    replicas: int
    local_replicas: range
    compiles_replicas: bool = False
    compiles_loops: bool = True
    trains_whole_model: bool = True
    layouts: TensorLayouts = TensorLayouts()
    communication: str = ""
    collectives: Collectives
    tuned: TunedCollectives | None = None
    sums_gradients: bool = False

    @property
    def blocks(self) -> VariableBlocks:
        """Reads and writes variables on the host."""
        return VariableBlocks(self)

    @property
    def adoption(self) -> VariableAdoption:
        """Adopts variables that were created outside of the scope."""
        return VariableAdoption(self.synchronize)

    def __repr__(self) -> str:
        """Names the class and the numbers of replicas and processes."""
        size = self.cluster.size
        processes = f" in {size} processes" if size > 1 else ""
        return f"<{type(self).__name__}: {self.replicas} replica{'s'[: self.replicas != 1]}{processes}>"

    @functools.cached_property
    def peers(self) -> Group:
        """Processes that must make the same calls, with equal variables; all, unless a subgroup is assigned."""
        return self.group

    @property
    def batch_parts(self) -> int:
        """Number of parts into which a global batch is split: one per replica, or per shard of a replica's rows."""
        return self.replicas * self.layouts.row_shards

    @property
    def devices_in_total(self) -> int:
        """Number of devices of the job; one per replica, unless a replica is spread over several."""
        return self.replicas * self.layouts.devices_per_replica

    @property
    def micro_batches(self) -> int:
        """Number of parts into which the strategy itself splits a replica's rows; 0 if only micro-steps do."""
        return 0

    @property
    def needs_equal_rows(self) -> bool:
        """Whether all replicas must have the same number of rows of a batch."""
        return self.compiles_replicas

    @property
    def can_train_locally(self) -> bool:
        """Whether replicas may update weights of their own between exchanges; not if the engine compiles whole steps."""
        return self.compiles_loops and not self.compiles_replicas and not self.sums_gradients

    def check_batch_size(self, batch_size: int, micro_steps: int = 1) -> None:
        """Raises `InputError` if a global batch cannot be divided among the replicas, and each part into micro-steps."""
        check_batch_size(batch_size, self.batch_parts, micro_steps, equal=self.needs_equal_rows)

    @property
    def parts(self) -> ModelParts:
        """The part of a model that this process trains."""
        return ModelParts(self._complete)

    @contextlib.contextmanager
    def _complete(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        with self.blocks.full_variables(variables), self.optimizer_shards.complete(variables):
            yield

    def refused_together(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context, entered by every process, that raises on all of them if its body raises on some.

        By default it does nothing: processes with the same model refuse the same.

        Args:
          name: names what the body does, the same on every process.
        """
        return contextlib.nullcontext()

    def trace_together(self, function: Any, *args: Any) -> None:
        """Traces a `tf.function` before it is called on every process, if some of them may fail to trace it.

        Args:
          function: the function.
          *args: arguments of the call.
        """

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files."""
        return self.cluster.rank == 0

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Context in which variables are placed for this strategy and it is `tfdist.current_strategy()`."""
        with self.in_use(), self._placement():
            yield self

    def in_use(self) -> contextlib.AbstractContextManager:
        """Context in which this is `tfdist.current_strategy()`; variables are placed where TensorFlow places them."""
        return _in_use(self)

    def _placement(self) -> contextlib.AbstractContextManager:
        """Returns the engine's own scope; by default variables are placed where TensorFlow places them."""
        return contextlib.nullcontext()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a replica function on every local replica, in step with the other processes.

        Args:
          function: takes the arguments of one replica and returns a structure of tensors. A batch of which the replica has no
            row is a `ReplicaRows`, so that code of a user or of Keras always sees at least one.
          *args: structures; of values returned by `run` or `distribute`, each replica gets its own part.

        Returns:
          The structure returned by the function, with tensors in the engine's per-replica form.
        """
        return self.in_replica(function)(*args)

    def local(self, value: Any) -> list[Any]:
        """Returns this process's values of a per-replica tensor or variable, in the order of `local_replicas`."""
        return [value]

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Inverse of `local`: combines the structures of this process's replicas into an argument for `run`."""
        [value] = values
        return value

    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        """Returns an iterator over per-replica elements for `run`, usable inside `tf.function` with `next`.

        Args:
          make_dataset: called with the indices of this process's replicas and the number of all replicas; returns a
            data set whose successive elements belong to the local replicas in turn.
        """
        return iter(make_dataset(self.local_replicas, self.replicas))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function that calls `run`: once for all numbers of rows, or once for each if shapes are static."""
        return tf.function(function, autograph=False, reduce_retracing=not self.compiles_replicas)

    def gradients(
        self, loss_fn: Callable[..., tuple[tf.Tensor, Any]], variables: Sequence[keras.Variable], *batch: Any
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices | None], tf.Tensor, Any]:
        """Runs the forward and backward pass: the first half of a step, inside a replica function.

        Args:
          loss_fn: called with the replica's batch; returns the scalar to differentiate and anything else.
          variables: variables with respect to which to differentiate.
          *batch: arguments of `loss_fn`.

        Returns:
          This replica's gradients, in the order of the variables (None where the loss does not depend on the variable),
          the loss, and whatever else `loss_fn` returned.
        """
        with tf.GradientTape() as tape:
            loss, rest = loss_fn(*batch)
        return tape.gradient(loss, [variable.value for variable in variables]), loss, rest

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """Runs the optimizer's update with reduced gradients: the second half of a step, inside a replica function.

        Disables the optimizer's own sum over replicas, because the gradients are already reduced.
        """
        keras_internals.disable_gradient_aggregation(optimizer)
        optimizer.apply(list(gradients), list(variables))

    def own_copies(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[None]:
        """Context, inside a replica function, in which assignments to variables change only this replica's values.

        Collectives must not be called in it: in one process, replicas take turns there, and share Keras's variables.
        """
        return contextlib.nullcontext()

    def apply_locally(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """Same as `apply`, but only for this replica: variables and the optimizer's state may then differ.

        There is no communication, so that it may be called inside a condition.
        """
        keras_internals.disable_gradient_aggregation(optimizer)
        optimizer.apply(list(gradients), list(variables))

    def allocate(self, states: Sequence[State]) -> list[tf.Variable]:
        """Creates the variables for these states; call it once per name, outside of any scope."""
        with self.scope():
            return [_variable(state) for state in states]

    def synchronize(self, variables: Sequence[tf.Variable]) -> None:
        """Copies the first replica's values to every replica; a no-op where the engine does so on variable creation."""

    @functools.cached_property
    def optimizer_shards(self) -> OptimizerShards:
        """Which part of the optimizer's state each replica has."""
        return OptimizerShards(self)

    @property
    def job_collectives(self) -> Collectives:
        """Collectives of all processes, of which several may compute one replica: for sums of losses and metrics."""
        return self.collectives

    @property
    def process_collectives(self) -> Collectives:
        """Collectives of the processes, each with one replica, that do not need `run` around them."""
        return self.collectives

    def process_device(self) -> contextlib.AbstractContextManager:
        """Context in which plain variables and operations are placed on this process's device."""
        return contextlib.nullcontext()

    def compiled_for_variables(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a replica function that reads and assigns variables; outside of functions, it is called like `function`.

        Its arguments are results of others that were compiled in this way.
        """
        return self.compiled(lambda *args: self.run(function, *args))

    @property
    def step_collectives(self) -> Collectives:
        """Collectives of training steps: those of the replicas, with the algorithms of `--all_reduce`."""
        return self.tuned or self.collectives

    def in_replica(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a replica function so that layers inside it find the strategy and its collectives."""

        @tf.autograph.experimental.do_not_convert
        def replica_function(*args: Any) -> Any:
            token = _in_replica.set(True)
            try:
                with using(self.collectives), _in_use(self), keras_internals.one_device_losses():
                    return function(*with_none(args))
            finally:
                _in_replica.reset(token)

        return replica_function

    def close(self) -> None:
        """Releases resources outside of this process's memory; whoever joined the group leaves it."""


def _variable(state: State) -> tf.Variable:
    kind: dict[str, Any] = {}
    # By default the variable would be mirrored, and its copies would diverge silently.
    if state.per_replica:
        kind = {
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.NONE,
        }
    initial = tf.broadcast_to(tf.cast(state.initial, state.dtype), state.shape)
    return tf.Variable(initial, trainable=False, name=state.name, **kind)


_in_replica: contextvars.ContextVar[bool] = contextvars.ContextVar("in a replica function", default=False)


def in_replica_function() -> bool:
    """Returns whether this thread is inside a replica function of any strategy."""
    return _in_replica.get()


_current: contextvars.ContextVar[Strategy | None] = contextvars.ContextVar("strategy", default=None)


@contextlib.contextmanager
def _in_use(strategy: Strategy) -> Iterator[None]:
    token = _current.set(strategy)
    try:
        yield
    finally:
        _current.reset(token)


def strategy_in_use() -> Strategy | None:
    """Returns the strategy whose scope is open or whose replica function is running; None if there is none."""
    return _current.get()


def current_strategy() -> Strategy:
    """Returns the strategy whose scope is open or whose replica function is running.

    Raises:
      InputError: there is none.
    """
    strategy = strategy_in_use()
    if strategy is None:
        raise InputError(
            "A strategy's scope must be open here. Received: none. Write `with strategy.scope():` around it."
        )
    return strategy
