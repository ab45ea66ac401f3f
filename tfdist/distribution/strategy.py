"""The `Strategy` interface, which defines where and how a step runs, and interfaces that only some strategies override.

The trainer uses a strategy only through these interfaces. `TensorLayouts`, `VariableBlocks`, `VariableAdoption`,
`OptimizerShards` and `ModelParts` are capabilities of some strategies.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.collectives import Collectives, collectives_scope
from tfdist.collectives.all_reduce_algorithms import TunedCollectives
from tfdist.config.strategy_registry import Declaration
from tfdist.coordination import Group
from tfdist.data import check_batch_size
from tfdist.data.row_partition import restore_none
from tfdist.distribution.variable_layouts import Dims
from tfdist.errors import InputError

Result = TypeVar("Result")
Variables = Sequence[keras.Variable]
LossFunction = Callable[..., tuple[tf.Tensor, Any]]  # returns the scalar to differentiate, and an auxiliary value
# The gradients, with None for variables on which the loss does not depend; the loss; and the auxiliary value.
LossGradients = tuple[list[tf.Tensor | tf.IndexedSlices | None], tf.Tensor, Any]


class Capability:
    """The base class of interfaces to what only some strategies can do; other strategies use the default methods."""

    def __init__(self, strategy: "Strategy"):
        self._strategy = strategy


class ModelParts(Capability):
    """The part of a model that each process trains; by default the full model.

    Attributes:
      computes_outputs: whether this process computes outputs, losses and metrics; otherwise it adds zeros to their sums.
    """

    computes_outputs: bool = True

    def local_part(self, model: keras.Model) -> keras.Model:
        """Returns the part of a model created in the scope that this process trains."""
        return model

    def description(self, part: keras.Model) -> str:
        """Describes the parts of all processes in one line; returns "" if each process has the full model."""
        return ""

    @contextlib.contextmanager
    def full_model(self, part: keras.Model) -> Iterator[keras.Model]:
        """Context that yields the full model of a part, for saving. The chief has all values. Every process must enter it.

        Args:
          part: result of `local_part`.
        """
        variables = [*part.variables, *part.optimizer.variables]
        strategy = self._strategy
        with strategy.blocks.full_variables(variables), strategy.optimizer_shards.complete(variables):
            yield part

    def regularization(self, part: keras.Model) -> float:
        """Returns the regularization loss of the full model; every process must call it."""
        return sum(float(tf.reduce_sum(loss)) for loss in keras_internals.weight_losses(part))

    def outputs(self, outputs: Any) -> Any:
        """Returns a replica's outputs in every process of the replica; call it in a replica function.

        Args:
          outputs: structure of tensors; only their shapes matter in a process that does not compute outputs.
        """
        return outputs


class OptimizerShards(Capability):
    """The part of the optimizer's state that each replica has; by default the full state.

    Attributes:
      parts: number of parts of the state.
    """

    parts: int = 1

    def deferred_build(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """Context in which a compiled model is built without its optimizer if `build` builds the optimizer."""
        return contextlib.nullcontext()

    def build(self, model: keras.Model) -> None:
        """Creates this process's part of the optimizer's state for a built model; call it outside of the scope."""

    def apply(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Variables) -> None:
        """Updates weights with reduced gradients, in a replica function; call `exchange` afterwards.

        An update without variables, as in a pipeline stage without trainable variables, still counts as a step.
        """
        if variables:
            self._strategy.apply(optimizer, gradients, variables)
        else:
            optimizer.iterations.assign_add(1)

    def exchange(self, variables: Sequence[keras.Variable]) -> None:
        """Sends updated weights to the replicas that did not update them, in a replica function."""

    def state_bytes(self, optimizer: keras.Optimizer) -> list[int]:
        """Returns the size of each part of the optimizer's variables, in bytes."""
        return [sum(keras_internals.bytes_of(variable) for variable in optimizer.variables)]

    def is_local_only(self, variable: keras.Variable) -> bool:
        """Returns whether this replica is the only one with a variable of the optimizer."""
        return False

    def is_on_all_replicas(self, variable: keras.Variable) -> bool:
        """Returns whether every replica has a variable of the optimizer."""
        return True

    def gather_from_owners(self, variables: Variables, values: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Returns, for each trained variable, the value of the replica with its state, in a replica function.

        Args:
          variables: trained variables.
          values: this replica's values, with the shapes and dtypes of the variables.
          name: name of the collective calls.
        """
        return list(values)

    def complete(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context in which the chief has the values of all given optimizer variables; every process must enter it."""
        return contextlib.nullcontext()


class TensorLayouts:
    """Layouts of tensors inside a replica function; by default, tensors are full and on one device.

    Attributes:
      row_shards: number of shards into which the rows of a replica are split.
      devices_per_replica: number of devices over which a replica is spread.
      shards_tensors: whether results of a model may be sharded; the model can then be called only in compiled steps.
      holds_variables: whether a step can read all variables of the model.
    """

    row_shards: int = 1
    devices_per_replica: int = 1
    shards_tensors: bool = False
    holds_variables: bool = True

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """Returns a tensor of a model in the layout of its dims; `name` is for errors. See `tfdist.constrain`."""
        return x

    def lay_out_rows(self, tensors: Any) -> Any:
        """Lays out model outputs for losses and metrics, or the rows of a micro-step."""
        return tensors

    def compute_layouts(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context in which variables have the layouts of a forward pass without gradients."""
        return contextlib.nullcontext()

    def to_stored_layout(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """Converts a value to the layout of the stored variable, for an assignment."""
        return value

    def compute_value(self, variable: keras.Variable, stored: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the value that a layer uses in its computation, differentiable with respect to the stored value.

        Args:
          variable: variable of the layer.
          stored: its value in the layout of the stored variable.
          inputs: inputs of the layer; the result is needed only when they are available.
        """
        return stored


class VariableAdoption(Capability):
    """Adopts variables created outside of the scope; by default these are plain variables, which may be created anywhere."""

    def owns(self, variable: keras.Variable) -> bool:
        """Returns whether a variable was created in the strategy's scope; True if the scope does not matter."""
        return True

    def creation(self) -> contextlib.AbstractContextManager:
        """Context in which a model must create the variables of its first call."""
        return contextlib.nullcontext()

    def adopt(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """Places variables as if they had been created in the scope, and keeps their values.

        Every process must call it with the same variables.

        Args:
          variables: variables of models and optimizers.
          optimizers: optimizers that own or update any of them.

        Raises:
          InputError: a variable must be created in the scope.
        """

    def as_one_device(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context for training outside of `fit` and of replica functions, in which variables behave as on one device.

        On exit, every replica of this process gets the values of the process's first replica.
        """
        return contextlib.nullcontext()

    def broadcast_values(self, variables: Sequence[keras.Variable]) -> None:
        """Copies the first replica's values of adopted variables to every replica; every process must call it."""
        self._strategy.synchronize(variables)


Read = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]  # (offset, shape) -> that block of a saved value


class JobVariables(NamedTuple):
    """The variables of all processes of a job.

    Attributes:
      forms: dtype and shape by name, as JSON.
      local_names: names of the variables whose local blocks this process writes.
    """

    forms: dict[str, Any]
    local_names: frozenset[str]


class VariableBlocks(Capability):
    """The local blocks of TensorFlow variables of the strategy; by default, each replica has full variables.

    With `per_replica`, each replica has its own value, and the saved array has an additional first dim, the replicas.

    Attributes:
      spans_processes: whether processes may have different blocks of a variable, and all must take part in reading it.
    """

    spans_processes: bool = False

    def saved_blocks(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Returns the blocks of a variable that this process saves: offsets in the saved array, and values on the host.

        There is no communication. The blocks of all processes cover the variable without overlap. If `copied` is False, the
        values may share the variable's memory.
        """
        read = _copy_to_host if copied else lambda value: np.asarray(tf.convert_to_tensor(value))
        values = [read(value) for value in self._strategy.local(variable)]
        if per_replica:
            return [
                ((replica, *(0,) * value.ndim), value[np.newaxis])
                for replica, value in zip(self._strategy.local_replicas, values, strict=True)
            ]
        return [((0,) * values[0].ndim, values[0])] if self._writes_replicated else []

    @property
    def _writes_replicated(self) -> bool:
        """Whether this process writes the variables that have equal values on all replicas."""
        return self._strategy.is_chief

    def job_variables(self, forms: Mapping[str, Any]) -> JobVariables:
        """Returns the variables of all processes, which may differ between processes; every process must call it.

        Args:
          forms: dtype and shape of this process's variables by name, as JSON.
        """
        return JobVariables(dict(forms), frozenset(forms))

    def copies(self, variable: tf.Variable) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """Returns all copies of a variable, or of its blocks, on this process's devices: (owner, offset, values).

        If replicas hold the same value, the copies of all processes with the same offset must be equal.
        """
        offset = (0,) * len(variable.shape)
        local_values = zip(self._strategy.local_replicas, self._strategy.local(variable), strict=True)
        return [(f"replica {replica}", offset, np.asarray(value)) for replica, value in local_values]

    def assign(self, variable: tf.Variable, per_replica: bool, read: Read) -> None:
        """Assigns a saved value to a variable on this process's devices; `read` returns the blocks that they need."""
        shape = tuple(variable.shape)
        if not per_replica:
            variable.assign(read((0,) * len(shape), shape))
            return
        for replica, local_variable in zip(self._strategy.local_replicas, self._strategy.local(variable), strict=True):
            local_variable.assign(read((replica, *(0,) * len(shape)), (1, *shape))[0])

    def assign_value(self, variable: tf.Variable, per_replica: bool, value: np.ndarray) -> None:
        """Assigns a full value, in any dtype, to a variable on this process's devices, the same on all replicas."""
        value = value.astype(variable.dtype.as_numpy_dtype)
        if per_replica:
            value = np.broadcast_to(value, (self._strategy.local_replicas.stop, *value.shape))
        self.assign(
            variable,
            per_replica,
            lambda offset, shape: value[tuple(slice(b, b + size) for b, size in zip(offset, shape, strict=True))],
        )

    def snapshot(self, variables: Sequence[tf.Variable]) -> Callable[[], None]:
        """Copies variables to the host without communication, and returns a function that restores them exactly.

        Each replica restores its own values, even of variables that are equal on all replicas.
        """
        copies = [[_copy_to_host(value) for value in self._strategy.local(variable)] for variable in variables]

        def restore() -> None:
            for variable, values in zip(variables, copies, strict=True):
                for local_variable, value in zip(self._strategy.local(variable), values, strict=True):
                    local_variable.assign(value)

        return restore

    def full_variables(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context in which the chief can read full variables for saving; every process must enter it."""
        return contextlib.nullcontext()


def _copy_to_host(value: Any) -> np.ndarray:
    """Copies a value to the host; TensorFlow copies a variable when it is read, but shares the memory of a tensor."""
    array = np.asarray(value)
    return array if array.flags.owndata else array.copy()


@dataclasses.dataclass(frozen=True)
class State:
    """A variable that keeps state of the step from step to step.

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

    def initial_value(self) -> tf.Tensor:
        """Returns the initial value as a tensor."""
        return tf.broadcast_to(tf.cast(self.initial, self.dtype), self.shape)


class Strategy:
    """Runs replica functions on the replicas of a job; this process hosts the replicas `local_replicas`.

    Attributes:
      declaration: declaration of a user-defined strategy; the registry has the declarations of tfdist's strategies.
      name: as in `--strategy`.
      cluster: this process in the job.
      group: control plane of the job's processes.
      replicas: number of replicas in the job.
      local_replicas: indices of this process's replicas, in order.
      compiles_replicas: whether XLA compiles replica functions. Shapes are then static, so every replica must get the same
        number of rows, and the time cannot be read.
      compiles_loops: whether a compiled function may loop over steps and take their batches from an iterator; otherwise the
        host calls each step.
      trains_whole_model: whether each process trains the full model, and may call it; otherwise each process has some of the
        layers, and processes send activations to each other.
      layouts: layouts of tensors inside replica functions.
      communication: a sentence with the communication library and the reason for it; empty if there is only one.
      collectives: collectives of the replicas, inside `run`.
      tuned_collectives: collectives for training steps if some all-reduces do not use the engine's algorithm; else None.
      remote: the `RemoteVariables` of a strategy with parameter servers; else None.
      sums_gradients: whether the engine itself sums the gradients of the global batch: `gradients` returns the sums, which are
        neither reduced nor compressed, and the engine compiles the whole program.
      supports_dynamic_embeddings: whether steps can train `tfdist.layers.DynamicEmbedding`.
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
    tuned_collectives: TunedCollectives | None = None
    sums_gradients: bool = False
    supports_dynamic_embeddings: bool = False
    remote: Any = None

    @property
    def blocks(self) -> VariableBlocks:
        """Reads and writes variables on the host."""
        return VariableBlocks(self)

    @property
    def adoption(self) -> VariableAdoption:
        """Adoption of variables that were created outside of the scope."""
        return VariableAdoption(self)

    def __repr__(self) -> str:
        """Returns the class and the numbers of replicas and processes."""
        size = self.cluster.size
        processes = f" in {size} processes" if size > 1 else ""
        return f"<{type(self).__name__}: {self.replicas} replica{'s'[: self.replicas != 1]}{processes}>"

    @functools.cached_property
    def peers(self) -> Group:
        """The processes that must make the same calls with equal variables; by default, all processes of the job."""
        return self.group

    @property
    def batch_parts(self) -> int:
        """Number of parts into which a global batch is split: one per replica, or per shard of a replica's rows."""
        return self.replicas * self.layouts.row_shards

    @property
    def training_shares(self) -> tuple[range, int]:
        """Indices of this process's shares of a global training batch, and the number of shares; one per replica by default."""
        return self.local_replicas, self.replicas

    @property
    def ledger_count(self) -> int:
        """Number of processes that record the examples they use: the first process of each group of replicas."""
        return self.replicas // len(self.local_replicas)

    @property
    def total_devices(self) -> int:
        """Number of devices of the job; one per replica, unless a replica is spread over several."""
        return self.replicas * self.layouts.devices_per_replica

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches into which the strategy splits a replica's rows; 0 if only micro-steps split them."""
        return 0

    @property
    def needs_equal_rows(self) -> bool:
        """Whether all replicas must have the same number of rows of a batch."""
        return self.compiles_replicas

    @property
    def can_train_locally(self) -> bool:
        """Whether replicas can update their own weights between exchanges, which a compiled step does not support."""
        return self.compiles_loops and not self.compiles_replicas and not self.sums_gradients

    def check_batch_size(self, batch_size: int, micro_steps: int = 1) -> None:
        """Raises `InputError` if a global batch cannot be divided among the replicas, and each part into micro-steps."""
        check_batch_size(batch_size, self.batch_parts, micro_steps, equal=self.needs_equal_rows)

    @property
    def parts(self) -> ModelParts:
        """The part of a model that this process trains."""
        return ModelParts(self)

    def raise_on_all_members(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context, entered by every process, that raises on all processes if its body raises on one.

        By default it does nothing, because processes with the same model raise the same errors.

        Args:
          name: name of the action, equal on every process.
        """
        return contextlib.nullcontext()

    def trace_together(self, function: Any, *args: Any) -> None:
        """Traces a `tf.function` before every process calls it, if tracing may fail in some of them."""

    def with_all_replicas(self, function: Callable[[], Result]) -> Result:
        """Returns the result of a function to which all replicas contribute; every process must call it.

        Args:
          function: called again if a replica is lost during the call and the job continues without it.
        """
        return function()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files."""
        return self.cluster.rank == 0

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Context in which this is `tfdist.current_strategy()` and new variables are placed for it."""
        with self.in_use(), self._placement():
            yield self

    def in_use(self) -> contextlib.AbstractContextManager:
        """Context in which this is `tfdist.current_strategy()`, and TensorFlow places variables."""
        return keras_internals.context_value(_current, self)

    def _placement(self) -> contextlib.AbstractContextManager:
        """Returns the engine's scope; by default, TensorFlow places variables."""
        return contextlib.nullcontext()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a replica function on every local replica, in step with the other processes.

        Args:
          function: takes the arguments of one replica and returns a structure of tensors. A batch without rows for the replica
            is a `ReplicaRows`, so code of users and of Keras always gets at least one row.
          *args: structures; each replica gets its own part of values from `run` or `distribute`.

        Returns:
          The result of the function, with tensors in the engine's per-replica form.
        """
        return self.replica_function(function)(*args)

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
            dataset whose successive elements belong to the local replicas in round-robin order.
        """
        return iter(make_dataset(self.local_replicas, self.replicas))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function that calls `run`: once for all batch sizes, or once for each if shapes are static."""
        return tf.function(function, autograph=False, reduce_retracing=not self.compiles_replicas)

    def gradients(self, loss_fn: LossFunction, variables: Variables, *batch: Any) -> LossGradients:
        """Runs the forward and backward pass, the first half of a step, inside a replica function.

        Args:
          loss_fn: takes the replica's batch; returns the scalar to differentiate and an auxiliary value.
          variables: variables with respect to which to differentiate.
          *batch: arguments of `loss_fn`.

        Returns:
          This replica's gradients in the order of the variables, with None if the loss does not depend on a variable; the
          loss; and the auxiliary value.
        """
        with tf.GradientTape() as tape:
            loss, auxiliary = loss_fn(*batch)
        return tape.gradient(loss, [variable.value for variable in variables]), loss, auxiliary

    def gradient_shape(self, variable: keras.Variable) -> tf.TensorShape:
        """Returns the static shape of the gradients of a variable, inside a replica function."""
        return variable.shape

    def apply(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Variables) -> None:
        """Runs the optimizer's update with reduced gradients, the second half of a step, inside a replica function."""
        keras_internals.disable_gradient_aggregation(optimizer)
        optimizer.apply(list(gradients), list(variables))

    def own_copies(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[None]:
        """Context, inside a replica function, in which assignments to variables change only this replica's values.

        Do not call collectives in it: a process's replicas enter it one after another, because they share Keras's variables.
        """
        return contextlib.nullcontext()

    def apply_locally(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Variables) -> None:
        """Updates only this replica, whose variables and optimizer state may then differ from those of other replicas.

        Does not communicate, so it may be called inside a condition.
        """
        self.apply(optimizer, gradients, variables)

    def allocate(self, states: Sequence[State]) -> list[tf.Variable]:
        """Creates the variables for `states`; call it once per name, outside of any scope."""
        with self.scope():
            return [_variable(state) for state in states]

    def synchronize(self, variables: Sequence[tf.Variable]) -> None:
        """Copies the first replica's values to every replica; a no-op if the engine already does so on creation."""

    @functools.cached_property
    def optimizer_shards(self) -> OptimizerShards:
        """The part of the optimizer's state that each replica has."""
        return OptimizerShards(self)

    @property
    def job_collectives(self) -> Collectives:
        """Collectives of all processes, for sums of losses and metrics, even if several processes compute one replica."""
        return self.collectives

    @property
    def process_collectives(self) -> Collectives:
        """Collectives for use outside of `run`, in which each process counts as one replica."""
        return self.collectives

    def process_device(self) -> contextlib.AbstractContextManager:
        """Context in which plain variables and operations are placed on this process's device."""
        return contextlib.nullcontext()

    def compile_for_variables(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a replica function that reads and assigns variables, for eager calls.

        Its arguments must be results of other functions that this method compiled.
        """
        return self.compiled(lambda *args: self.run(function, *args))

    @property
    def step_collectives(self) -> Collectives:
        """Collectives of the replicas in training steps, with the algorithms of `--all_reduce`."""
        return self.tuned_collectives or self.collectives

    def replica_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function with the context in which layers find the strategy and its collectives."""

        @tf.autograph.experimental.do_not_convert
        def call(*args: Any) -> Any:
            with (
                replica_context(),
                collectives_scope(self.collectives),
                self.in_use(),
                keras_internals.one_device_losses(),
            ):
                return function(*restore_none(args))

        return call

    def close(self) -> None:
        """Releases resources outside of this process's memory; does not leave the group."""


def _variable(state: State) -> tf.Variable:
    options: dict[str, Any] = {}
    # The default would be a mirrored variable, whose copies would diverge silently.
    if state.per_replica:
        options = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.NONE}
    return tf.Variable(state.initial_value(), trainable=False, name=state.name, **options)


_in_replica: contextvars.ContextVar[bool] = contextvars.ContextVar("in a replica function", default=False)


def replica_context() -> contextlib.AbstractContextManager[None]:
    """Context in which `in_replica_function` returns True."""
    return keras_internals.context_value(_in_replica, True)


def in_replica_function() -> bool:
    """Returns whether this thread is inside a replica function of any strategy."""
    return _in_replica.get()


_current: contextvars.ContextVar[Strategy | None] = contextvars.ContextVar("strategy", default=None)


def strategy_in_use() -> Strategy | None:
    """Returns the strategy whose scope is open or whose replica function is running, or None."""
    return _current.get()


def current_strategy() -> Strategy:
    """Returns the strategy whose scope is open or whose replica function is running.

    Raises:
      InputError: no scope is open and no replica function is running.
    """
    strategy = strategy_in_use()
    if strategy is None:
        raise InputError(
            "A strategy's scope must be open. Received no scope. Put this code inside `with strategy.scope():`."
        )
    return strategy
