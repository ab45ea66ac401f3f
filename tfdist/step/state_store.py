"""Stores the named variables that parts of a step keep from step to step."""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.distribution.strategy import State, Strategy

_log = logging.getLogger(__name__)


class StateArray(NamedTuple):
    """The value of one state."""

    per_replica: bool  # whether each replica has its own value; otherwise all have the same value
    values: np.ndarray  # [local replicas, ...] if per replica, else the value


class StateStore:
    """Creates and stores the variables of states, one for each name for the whole run."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._states: dict[str, tuple[State, tf.Variable]] = {}
        self._pending_values: dict[str, StateArray] = {}
        self._message = ""  # logged when the first per-replica state is restored

    def variables(self, states: Sequence[State]) -> list[tf.Variable]:
        """Returns the variables of these states, whose names are unique; creates those that do not exist yet."""
        names = [state.name for state in states]
        if len(set(names)) < len(names):
            raise ValueError(f"States must have unique names. Received: {sorted(names)}.")
        new_states = [state for state in states if state.name not in self._states]
        for state, variable in zip(new_states, self._strategy.allocate(new_states), strict=True):
            self._states[state.name] = (state, variable)
            if state.name in self._pending_values:
                self._restore(state, variable, self._pending_values.pop(state.name))
        return [self._states[name][1] for name in names]

    def restore(self, values: Mapping[str, StateArray], message: str = "") -> None:
        """Assigns values of another run to states, now or when the states are created; resets states without a value.

        `message` is logged once, when a per-replica state is restored.
        """
        self._pending_values, self._message = dict(values), message
        for name, (state, variable) in self._states.items():
            initial = np.asarray(state.initial_value())
            count = len(self._strategy.local_replicas)
            initial_array = StateArray(state.per_replica, np.stack([initial] * count) if state.per_replica else initial)
            self._assign(state, variable, initial_array)
            if name in self._pending_values:
                self._restore(state, variable, self._pending_values.pop(name))

    def _restore(self, state: State, variable: tf.Variable, value: StateArray) -> None:
        """Assigns the value of another run to a new state if shape and dtype match."""
        shape = value.values.shape[1:] if value.per_replica else value.values.shape
        dtype = np.dtype(state.dtype.as_numpy_dtype)
        if (value.per_replica, shape, value.values.dtype) != (state.per_replica, state.shape, dtype):
            specs = value.values.dtype, list(shape), dtype, list(state.shape)
            _log.warning("%s is reset: its dtype and shape were %s%s and are now %s%s.", state.name, *specs)
            return
        self._assign(state, variable, value)
        if state.per_replica and self._message:
            if self._strategy.is_chief:
                _log.info("%s", self._message)
            self._message = ""

    def _assign(self, state: State, variable: tf.Variable, value: StateArray) -> None:
        first = self._strategy.local_replicas.start

        def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
            begin = (offset[0] - first, *offset[1:]) if value.per_replica else offset
            return value.values[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]

        self._strategy.blocks.assign(variable, state.per_replica, read)

    def items(self) -> list[tuple[State, tf.Variable]]:
        """Returns the states and their variables."""
        return list(self._states.values())

    def array(self, name: str) -> StateArray:
        """Returns the value of one state, copied to the host."""
        state, variable = self._states[name]
        values = [np.asarray(value) for value in self._strategy.local(variable)]
        return StateArray(state.per_replica, np.stack(values) if state.per_replica else values[0])

    @property
    def loss_scale(self) -> float | None:
        """The current factor of the loss; None without loss scaling. Replicas may differ."""
        return float(np.min(self.array("loss_scale/scale").values)) if "loss_scale/scale" in self._states else None

    def arrays(self) -> dict[str, StateArray]:
        """Returns the values of all states by name, copied to the host."""
        return {name: self.array(name) for name in self._states}
