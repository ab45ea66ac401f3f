"""What a worker knows of the variables that servers hold: copies of weights, and slots of which it has no copy."""

import contextlib
import itertools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.staleness import SYNC, Staleness
from tfdist.distribution.strategy import OptimizerShards
from tfdist.errors import InputError
from tfdist.errors.numbers import byte_size, count_of
from tfdist.gradients import Clip
from tfdist.parameter_server.servers import Servers
from tfdist.parameter_server.variable_server import optimizer_keys

if TYPE_CHECKING:
    from tfdist.distribution.strategy import Strategy


class RemoteVariable:
    """A variable of which a worker has no copy: a read fetches the value, an assignment of the chief sends it.

    Attributes:
      shape: its shape.
      dtype: its dtype.
    """

    def __init__(self, key: str, variable: keras.Variable, servers: Servers, *, is_chief: bool):
        """Initializes the variable.

        Args:
          key: see `VariableServer`.
          variable: the Keras variable.
          servers: the servers.
          is_chief: whether this process writes; all processes assign the same values.
        """
        self._key, self._servers, self._is_chief, self._model = key, servers, is_chief, servers.models
        self.shape, self.dtype = tf.TensorShape(variable.shape), tf.as_dtype(variable.dtype)

    def numpy(self) -> np.ndarray:
        """Returns the value."""
        self._check_held()
        return self._servers.fetch([self._key])[self._key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def assign(self, value: Any) -> None:
        """Assigns a value."""
        self._check_held()
        if self._is_chief:
            self._servers.write({self._key: np.asarray(value, self.dtype.as_numpy_dtype)})

    def _check_held(self) -> None:
        if self._model != self._servers.models:
            raise InputError(
                "Parameter servers hold one model at a time. Received: a read or an assignment of an optimizer's state, and "
                "another model that was built later. Save a model before another one is trained."
            )


tf.register_tensor_conversion_function(
    RemoteVariable, lambda value, dtype=None, name=None, as_ref=False: tf.constant(value.numpy(), dtype, name=name)
)


class RemoteVariables(OptimizerShards):
    """The variables of a training, as one worker sees them: it has copies of the weights, and an optimizer without slots.

    Attributes:
      servers: the servers.
      staleness: when gradients become updates.
      whole_batches: whether a worker computes the whole batch of a step, instead of a share.
      tolerate_losses: makes the job go on without workers that are lost from now on, if they compute whole batches.
      records_updates: whether to record all updates, to replay them.
      states: variables that layers assign, of which servers have the values, too, if workers compute whole batches;
        otherwise each worker has its own, as a replica does.
    """

    def __init__(
        self, strategy: "Strategy", servers: Servers, staleness: Staleness, tolerate_losses: Callable[[], object]
    ):
        """Initializes the variables; see the attributes."""
        super().__init__(strategy)
        self.tolerate_losses = tolerate_losses
        self._is_chief, self.servers, self.staleness = strategy.is_chief, servers, staleness
        self.whole_batches, self.records_updates = staleness.kind != SYNC, False
        self._own: dict[str, keras.Variable] = {}  # the optimizer's variables that are no slots, by key
        self._slot_values: dict[str, np.ndarray] = {}  # of an optimizer that was built before, for the servers
        self._weights: list[keras.Variable] = []
        self._known: dict[str, np.ndarray] = {}  # the values that servers have, as the chief knows them
        self.states: list[keras.Variable] = []

    @property
    def description(self) -> str:
        """What the servers hold, such as `198.5 KiB of weights on 1 server; staleness bounded(4)`."""
        sizes = [byte_size(size) for size in self.servers.loads(list(map(keras_internals.bytes_of, self._weights)))]
        return f"{' + '.join(sizes)} of weights on {count_of(len(sizes), 'server')}; staleness {self.staleness}"

    def built_later(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """See base class."""
        return keras_internals.without_optimizer(model)

    def build(self, model: keras.Model) -> None:
        """See base class."""
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise InputError(
                "Parameter servers need no loss scaling. Received: a LossScaleOptimizer. Use --precision=mixed_bfloat16."
            )
        self._weights, optimizer = list(model.trainable_variables), model.optimizer
        self.states = keras_internals.moving_statistics(model) if self.whole_batches else []
        is_built = optimizer.built  # as that of a loaded model
        twin = type(optimizer).from_config(optimizer.get_config()) if is_built else optimizer
        owners = keras_internals.build_partially(twin, self._weights, ())
        keys = optimizer_keys(twin, owners, range(len(self._weights)))
        if len(keys) != len(optimizer.variables):
            raise InputError(
                f"An optimizer must have been built with the variables that it updates. Received: {optimizer.name}, with "
                f"{len(optimizer.variables)} variables instead of {len(keys)}. Compile {model.name} with a new one."
            )
        is_slot = [id(variable) in owners for variable in twin.variables]
        slots = dict(itertools.compress(zip(keys, optimizer.variables, strict=True), is_slot))
        self._slot_values = {key: _array(variable) for key, variable in slots.items()} if is_built else {}
        self.servers.place(*([keras_internals.bytes_of(v) for v in each] for each in (self._weights, self.states)))
        for key, variable in slots.items():
            remote = RemoteVariable(key, variable, self.servers, is_chief=self._is_chief)
            keras_internals.set_value(variable, remote)
        self._known = {}
        self._own = {key: v for key, v in zip(keys, optimizer.variables, strict=True) if key not in slots}

    def check_holds(self, model: keras.Model) -> None:
        """Raises `InputError` if another model was built since this one, whose variables the servers hold now."""
        if [id(variable) for variable in model.trainable_variables] != [id(variable) for variable in self._weights]:
            raise InputError(
                f"Parameter servers hold one model at a time. Received: {model.name}, and another that was built later. Train "
                "one after the other."
            )

    def is_of_all(self, variable: keras.Variable) -> bool:
        """See base class."""
        return not isinstance(keras_internals.value_of(variable), RemoteVariable)

    def define(self, optimizer: keras.Optimizer, clip: Clip) -> str:
        """Creates the variables on the servers, with this process's values; the chief calls it.

        Returns:
          Why the servers refuse the optimizer; "" if they do not.
        """
        left_out = getattr(optimizer, "_exclude_from_weight_decay", None) or ()
        refused = self.servers.define(
            [_array(variable) for variable in self._weights],
            [_array(variable) for variable in self.states],
            [(v.path, _constraint(v), any(name in v.path for name in left_out)) for v in self._weights],
            optimizer=keras.saving.serialize_keras_object(optimizer),
            floatx=keras.config.floatx(),
            epsilon=keras.config.epsilon(),
            clip_norm=clip.norm,
            clip_value=clip.value,
        )
        if not refused:
            self.servers.write(self._slot_values)
        self._slot_values = {}
        return refused

    def write_changes(self, version: int) -> None:
        """Sends what was assigned since the last `pull`, such as a learning rate, to the servers; the chief calls it."""
        values = {key: _array(variable) for key, variable in self._variables().items()}
        changed = {k: v for k, v in values.items() if k not in self._known or not np.array_equal(v, self._known[k])}
        self.servers.write(changed, version=version)

    def pull(self, version: int) -> tuple[list[int], list[np.ndarray], float]:
        """Assigns weights and states of this version or newer ones.

        Returns:
          The versions, by server; the states; and the norm of the latest gradient of which a norm was requested.
        """
        versions, weights, states, norm = self.servers.pull(version)
        for variable, value in zip([*self._weights, *self.states], [*weights, *states], strict=True):
            keras_internals.value_of(variable).assign(value)
        return versions, states, norm

    def pull_all(self, version: int) -> float:
        """Same as `pull`, with the variables of the optimizer that are no slots; returns the norm."""
        *_, norm = self.pull(version)
        for key, value in self.servers.fetch(self._own).items():
            self._own[key].assign(value)
        if self._is_chief:
            self._known = {key: _array(variable) for key, variable in self._variables().items()}
        return norm

    def _variables(self) -> dict[str, keras.Variable]:
        weights = {f"weight/{i}": variable for i, variable in enumerate(self._weights)}
        return weights | {f"state/{i}": variable for i, variable in enumerate(self.states)} | self._own


def _array(variable: keras.Variable) -> np.ndarray:
    return np.array(keras_internals.value_of(variable))


def _constraint(variable: keras.Variable) -> Any:
    return keras.constraints.serialize(variable.constraint) if variable.constraint else None
