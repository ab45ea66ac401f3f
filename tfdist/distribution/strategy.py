"""The contract `Strategy`: where a step runs. And how one is found by name.

The trainer composes these methods and knows nothing else of a strategy. What only some strategies can do is a small
interface of its own, beside this one.
"""

import abc
import contextlib
import contextvars
import dataclasses
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

Read = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]  # of an offset and a shape: that block of a saved value

NAMES = ("single", "mirrored", "multiworker", "tpu", "horovod", "mesh")


@dataclasses.dataclass(frozen=True)
class State:
    """State that a part of the step wants kept from step to step.

    Attributes:
      name: unique in the run, stable over runs.
      shape: static shape.
      dtype: element type.
      per_replica: whether each replica has a value of its own, or all the same one.
      initial: what it starts with, a number or an array of its shape; the same on every replica.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    per_replica: bool
    initial: Any = 0


class Strategy(abc.ABC):
    """Runs replica functions on the replicas of a job, of which this process holds `local_replicas`.

    Attributes:
      name: as in `--strategy`.
      cluster: this process among the job's processes.
      group: the control plane of the job's processes.
      replicas: how many replicas the job has.
      local_replicas: the numbers of this process's replicas, in order.
      compiles_replicas: whether XLA compiles what replicas run: shapes are static, so that every replica must get the same
        number of rows, and there is no clock.
      global_view: whether a replica function's tensors are whole ones, which the engine splits over devices and sends as it
        sees fit: there is one replica, nothing to reduce, and the host calls each step.
    """

    name: str
    cluster: Cluster
    group: Group
    replicas: int
    local_replicas: range
    compiles_replicas: bool = False
    global_view: bool = False

    @property
    def batch_parts(self) -> int:
        """In how many parts a batch is computed: one for each replica, or as many as a mesh splits its rows into."""
        return self.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files."""
        return self.cluster.rank == 0

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Variables born inside are placed for this strategy; it is `tfdist.current_strategy()` inside."""
        with self.in_use(), self._placement():
            yield self

    def in_use(self) -> contextlib.AbstractContextManager:
        """It is `tfdist.current_strategy()` inside; variables are placed where TensorFlow places them."""
        return _in_use(self)

    def _placement(self) -> contextlib.AbstractContextManager:
        """The engine's own scope; by default variables are placed where TensorFlow places them."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a replica function on every local replica, in step with the other processes.

        Args:
          function: takes one replica's arguments, returns a structure of tensors.
          *args: structures, of which what `run` or `distribute` returned is given to each replica as its own part.

        Returns:
          The structure that the function returns, its tensors in the engine's form for per-replica values.
        """

    @abc.abstractmethod
    def local(self, value: Any) -> list[Any]:
        """This process's replicas' values of a per-replica tensor or variable, in the order of `local_replicas`."""

    def per_replica(self, values: Sequence[Any]) -> Any:
        """What `run` takes apart: the structures of this process's replicas, in the order of `local_replicas`."""
        [value] = values
        return value

    @abc.abstractmethod
    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        """Returns an iterator over per-replica elements for `run`, usable inside `tf.function` with `next`.

        Args:
          make_dataset: given this process's replicas and the number of all replicas, returns the data set whose
            successive elements belong to the successive local replicas, round and round.
        """

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function that calls `run`."""
        return tf.function(function, autograph=False)

    def gradients(
        self, loss_fn: Callable[..., tuple[tf.Tensor, Any]], variables: Sequence[keras.Variable], *batch: Any
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices | None], tf.Tensor, Any]:
        """The first half of a step, inside a replica function: forward and backward.

        Args:
          loss_fn: of one replica's batch; returns the scalar to differentiate and anything else.
          variables: the variables to differentiate by.
          *batch: loss_fn's arguments.

        Returns:
          This replica's gradients, in the order of the variables (None where the loss does not depend on one), the
          loss, and the rest of what loss_fn returned.
        """
        with tf.GradientTape() as tape:
            loss, rest = loss_fn(*batch)
        return tape.gradient(loss, [variable.value for variable in variables]), loss, rest

    def computing(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Inside, in a replica function, the variables are as a forward pass without gradients needs them."""
        return contextlib.nullcontext()

    def computed_from(self, variable: keras.Variable, held: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """What a layer computes with, differentiable by what is held of a variable between layers; by default the same.

        Args:
          variable: of the layer.
          held: its value as it is held.
          inputs: of the layer; the result need not be there before them.
        """
        return held

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """A tensor of a model in the layout that its dims have; `name` is for messages. See `tfdist.constrain`."""
        return x

    def by_rows(self, tensors: Any) -> Any:
        """A model's outputs as losses and metrics get them, or the rows of a micro-step; inside a replica function."""
        return tensors

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """The second half of a step, inside a replica function: the optimizer's update with whole gradients."""
        optimizer.apply(list(gradients), list(variables))

    def allocate(self, states: Sequence[State]) -> list[tf.Variable]:
        """Creates variables for state that others describe; call it once for each name, under no scope."""
        with self.scope():
            return [_variable(state) for state in states]

    def synchronize(self, variables: Sequence[tf.Variable]) -> None:
        """Makes the variables equal to the first replica's on every replica; engines that do so at birth need not."""

    def send_from_first(self, variables: Sequence[keras.Variable]) -> None:
        """Gives placed variables the values of the first replica, on every replica; every process calls it."""
        self.synchronize(variables)

    def written(self, variable: tf.Variable, per_replica: bool) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """What this process saves of a variable: copies on the host, each with its offset in what is saved.

        Nothing is sent. The blocks of all processes are all of the variable, and no two of them overlap.

        Args:
          variable: TensorFlow's, of this strategy.
          per_replica: whether each replica has a value of its own; what is saved then has a first dim of all replicas.
        """
        values = [_copied(value) for value in self.local(variable)]
        if per_replica:
            return [
                ((replica, *(0,) * value.ndim), value[np.newaxis])
                for replica, value in zip(self.local_replicas, values, strict=True)
            ]
        return [((0,) * values[0].ndim, values[0])] if self.is_chief else []

    def copies(self, variable: tf.Variable) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """All copies of a variable, or of its blocks, on this process's devices: whose it is, the offset, the values.

        Those of all processes with one offset must be equal, where replicas have the variable alike.
        """
        zeros = (0,) * len(variable.shape)
        own = zip(self.local_replicas, self.local(variable), strict=True)
        return [(f"replica {replica}", zeros, np.asarray(value)) for replica, value in own]

    def assign(self, variable: tf.Variable, per_replica: bool, read: Read) -> None:
        """Gives a variable the value that was saved, on this process's devices.

        Args:
          variable: TensorFlow's, of this strategy.
          per_replica: as for `written`.
          read: asked for the blocks that this process needs.
        """
        shape = tuple(variable.shape)
        if not per_replica:
            variable.assign(read((0,) * len(shape), shape))
            return
        for replica, own in zip(self.local_replicas, self.local(variable), strict=True):
            own.assign(read((replica, *(0,) * len(shape)), (1, *shape))[0])

    def adopt(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """Places variables that were created outside of the scope as if they had been created inside; they keep their values.

        Every process calls it, with the same variables.

        Args:
          variables: of models and optimizers.
          optimizers: that have some of them, or update some.
        """

    def as_one_device(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Inside, outside of replica functions, variables are those of one device; each has all that was assigned when it ends.

        For code that trains by itself beside `fit`: every replica has what this process's first one has got.
        """
        return contextlib.nullcontext()

    def owns(self, variable: keras.Variable) -> bool:
        """Whether a variable was born in this strategy's scope, as far as that makes a difference."""
        return True

    def whole(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Inside, the variables read as whole ones on the host, to be saved; every process calls it."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Gives back what the strategy holds outside this process's memory; the group is left by who joined it."""


class HasCollectives(Strategy):
    """A strategy whose replicas speak to each other through `Collectives`, inside `run`."""

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
    """On the host, and nobody else's: TensorFlow copies a variable that it shows, and lends a tensor's own memory."""
    found = np.asarray(value)
    return found if found.flags.owndata else found.copy()


def _variable(state: State) -> tf.Variable:
    kind: dict[str, Any] = {}
    if state.per_replica:  # the default would be a mirrored variable that silently drifts
        kind = {
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.NONE,
        }
    initial = tf.broadcast_to(tf.cast(state.initial, state.dtype), state.shape)
    return tf.Variable(initial, trainable=False, name=state.name, **kind)


_in_replica: contextvars.ContextVar[bool] = contextvars.ContextVar("in a replica function", default=False)


def in_replica_function() -> bool:
    """Whether a replica function of some strategy is under way in this thread."""
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
    """The strategy whose `scope()` is open, or one of whose replica functions this is; None for none."""
    return _current.get()


def current_strategy() -> Strategy:
    """Returns the strategy whose `scope()` is open, or one of whose replica functions this is."""
    strategy = strategy_in_use()
    if strategy is None:
        raise InputError(
            "A strategy's scope must be open here. Received: none. Write `with strategy.scope():` around it."
        )
    return strategy


def strategy_class(name: str) -> type[Strategy]:
    """Returns the class of a strategy: one of `NAMES`, or a third party's as `package.module:Class`."""
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
      cluster: this process among the job's.
      join: joins the job's group; called once, when the strategy knows the group's address.
      options: keyword arguments of the strategy's constructor.

    Raises:
      InputError: the strategy has no such option, or cannot be had here.
    """
    chosen = strategy_class(name)
    known = [p for p in inspect.signature(chosen).parameters if p not in ("cluster", "join")]
    for option in options or {}:
        if option not in known:
            raise InputError(f"The strategy {name} has no option {option}.{nearest(option, known)}")
    made: Strategy = chosen(cluster=cluster, join=join, **dict(options or {}))  # type: ignore[call-arg]  # a convention
    return made
