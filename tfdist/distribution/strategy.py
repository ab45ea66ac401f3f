"""The `Strategy` contract: where and how a step runs; and creation of strategies by name.

The trainer composes these methods and knows nothing else about a strategy. What only some strategies can do is a
separate small interface.
"""

import abc
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.collectives import Collectives, using
from tfdist.coordination import Group
from tfdist.errors import InputError
from tfdist.grammar.spec import load_object, nearest
from tfdist.sharding.dim_names import Dims

Read = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]  # (offset, shape) -> that block of a saved value

NAMES = ("single", "mirrored", "multiworker", "tpu", "horovod", "mesh")


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


class Strategy(abc.ABC):
    """Runs replica functions on the replicas of a job; this process hosts `local_replicas`.

    Attributes:
      name: as in `--strategy`.
      cluster: this process in the job.
      group: control plane of the job's processes.
      replicas: number of replicas in the job.
      local_replicas: indices of this process's replicas, in order.
      compiles_replicas: whether replica functions are compiled by XLA: shapes are static, so every replica must get the
        same number of rows, and there is no clock.
      global_view: whether a replica function sees global tensors, which the engine shards over devices and communicates
        as needed: there is one replica, nothing to reduce, and each step is called from the host.
    """

    name: str
    cluster: Cluster
    group: Group
    replicas: int
    local_replicas: range
    compiles_replicas: bool = False
    global_view: bool = False

    @functools.cached_property
    def peers(self) -> Group:
        """Processes that must make the same calls, with equal variables; all, unless a subgroup is assigned."""
        return self.group

    @property
    def batch_parts(self) -> int:
        """Number of parts into which a batch is split: one per replica, or the number of row shards on a mesh."""
        return self.replicas

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

    @abc.abstractmethod
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a replica function on every local replica, in step with the other processes.

        Args:
          function: takes the arguments of one replica and returns a structure of tensors.
          *args: structures; of values returned by `run` or `distribute`, each replica gets its own part.

        Returns:
          The structure returned by the function, with tensors in the engine's per-replica form.
        """

    @abc.abstractmethod
    def local(self, value: Any) -> list[Any]:
        """Returns this process's values of a per-replica tensor or variable, in the order of `local_replicas`."""

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Inverse of `local`: combines the structures of this process's replicas into an argument for `run`."""
        [value] = values
        return value

    @abc.abstractmethod
    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        """Returns an iterator over per-replica elements for `run`, usable inside `tf.function` with `next`.

        Args:
          make_dataset: called with the indices of this process's replicas and the number of all replicas; returns a
            data set whose successive elements belong to the local replicas in turn.
        """

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function that calls `run`."""
        return tf.function(function, autograph=False)

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

    def computing(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context, in a replica function, in which variables are as a forward pass without gradients needs them."""
        return contextlib.nullcontext()

    def computed_from(self, variable: keras.Variable, held: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the value that a layer computes with, differentiable w.r.t. the stored one; by default the same.

        Args:
          variable: variable of the layer.
          held: its value as it is stored between layers.
          inputs: inputs of the layer; the result is not needed before they are available.
        """
        return held

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """Returns a tensor of a model in the layout of its dims; `name` is for messages. See `tfdist.constrain`."""
        return x

    def by_rows(self, tensors: Any) -> Any:
        """Lays out model outputs for losses and metrics, or the rows of a micro-step; inside a replica function."""
        return tensors

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """Runs the optimizer's update with reduced gradients: the second half of a step, inside a replica function."""
        optimizer.apply(list(gradients), list(variables))

    def allocate(self, states: Sequence[State]) -> list[tf.Variable]:
        """Creates the variables for these states; call it once per name, outside of any scope."""
        with self.scope():
            return [_variable(state) for state in states]

    def synchronize(self, variables: Sequence[tf.Variable]) -> None:
        """Copies the first replica's values to every replica; a no-op where the engine does so on variable creation."""

    def send_from_first(self, variables: Sequence[keras.Variable]) -> None:
        """Copies the first replica's values of placed variables to every replica; every process must call it."""
        self.synchronize(variables)

    def written(self, variable: tf.Variable, per_replica: bool) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Returns what this process saves of a variable: copies on the host, each with its offset in the saved array.

        There is no communication. The blocks of all processes cover the variable without overlap.

        Args:
          variable: TensorFlow variable of this strategy.
          per_replica: whether each replica has its own value; the saved array then has an additional first dim over all
            replicas.
        """
        values = [_copied(value) for value in self.local(variable)]
        if per_replica:
            return [
                ((replica, *(0,) * value.ndim), value[np.newaxis])
                for replica, value in zip(self.local_replicas, values, strict=True)
            ]
        return [((0,) * values[0].ndim, values[0])] if self.is_chief else []

    def copies(self, variable: tf.Variable) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """Returns all copies of a variable, or of its blocks, on this process's devices: (owner, offset, values).

        If replicas hold the same value, the copies of all processes with the same offset must be equal.
        """
        zeros = (0,) * len(variable.shape)
        own = zip(self.local_replicas, self.local(variable), strict=True)
        return [(f"replica {replica}", zeros, np.asarray(value)) for replica, value in own]

    def assign(self, variable: tf.Variable, per_replica: bool, read: Read) -> None:
        """Assigns a saved value to a variable on this process's devices.

        Args:
          variable: TensorFlow variable of this strategy.
          per_replica: as for `written`.
          read: called for the blocks that this process needs.
        """
        shape = tuple(variable.shape)
        if not per_replica:
            variable.assign(read((0,) * len(shape), shape))
            return
        for replica, own in zip(self.local_replicas, self.local(variable), strict=True):
            own.assign(read((replica, *(0,) * len(shape)), (1, *shape))[0])

    def adopt(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """Places variables created outside of the scope as if they had been created inside; their values are kept.

        Every process must call it, with the same variables.

        Args:
          variables: variables of models and optimizers.
          optimizers: optimizers that own or update any of them.
        """

    def as_one_device(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context, outside of replica functions, in which variables behave as on one device.

        For code that trains beside `fit`: on exit, every replica of this process gets the values of its first one.

        Args:
          variables: the variables that the code uses.
        """
        return contextlib.nullcontext()

    def owns(self, variable: keras.Variable) -> bool:
        """Returns whether a variable was created in this strategy's scope, if that makes a difference."""
        return True

    def whole(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context in which the full variables can be read on the host, to save them; every process must enter it."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Releases resources outside of this process's memory; whoever joined the group leaves it."""


class HasCollectives(Strategy):
    """A strategy whose replicas communicate through `Collectives`, inside `run`.

    Attributes:
      collectives: collectives of the replicas.
    """

    collectives: Collectives

    def in_replica(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a replica function so that layers inside it find the strategy and its collectives."""

        @tf.autograph.experimental.do_not_convert
        def replica_function(*args: Any) -> Any:
            token = _in_replica.set(True)
            try:
                with using(self.collectives), _in_use(self), keras_internals.one_device_losses():
                    return function(*args)
            finally:
                _in_replica.reset(token)

        return replica_function


def _copied(value: Any) -> np.ndarray:
    """Copies a value to the host; TensorFlow copies a variable when it is read, but shares the memory of a tensor."""
    found = np.asarray(value)
    return found if found.flags.owndata else found.copy()


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


def strategy_class(name: str) -> type[Strategy]:
    """Returns the class of a strategy.

    Args:
      name: one of `NAMES`, or `package.module:Class`.

    Raises:
      InputError: there is no such strategy.
    """
    if ":" in name:
        found = load_object(name)
        if not (isinstance(found, type) and issubclass(found, Strategy)):
            raise InputError(f"--strategy={name} must name a subclass of tfdist.Strategy. Received: {found!r}.")
        return found
    if name not in NAMES:
        raise InputError(f"--strategy={name} is not known.{nearest(name, ('auto', *NAMES))}")
    try:
        module = importlib.import_module(f"tfdist.strategies.{name}")
    except ModuleNotFoundError as error:
        if error.name == "tfdist.strategies":
            raise InputError(
                "tfdist is not installed: this is a bare checkout. Run `pip install -e .` in it."
            ) from error
        raise
    return module.STRATEGY


def create(
    name: str, cluster: Cluster, join: Callable[[Cluster], Group], options: Mapping[str, Any] | None = None
) -> Strategy:
    """Creates a strategy.

    Args:
      name: see `strategy_class`.
      cluster: this process in the job.
      join: joins the job's group; called once, when the strategy knows the group's address.
      options: keyword arguments of the strategy's constructor.

    Raises:
      InputError: the strategy has no such option, or is not available here.
    """
    chosen = strategy_class(name)
    known = [p for p in inspect.signature(chosen).parameters if p not in ("cluster", "join")]
    for option in options or {}:
        if option not in known:
            raise InputError(f"The strategy {name} has no option {option}.{nearest(option, known)}")
    made: Strategy = chosen(cluster=cluster, join=join, **dict(options or {}))  # type: ignore[call-arg]  # a convention
    return made
