"""Reading and writing the variables of a strategy on the host, block by block: for checkpoints and comparisons."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

Read = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]  # (offset, shape) -> that block of a saved value


class Replicas(Protocol):
    """What the blocks need to know of a strategy."""

    local_replicas: range

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files."""

    def local(self, value: Any) -> list[Any]:
        """Returns this process's values of a per-replica variable, in the order of `local_replicas`."""


class VariablesOfAll(NamedTuple):
    """The variables of all processes of a job.

    Attributes:
      forms: dtype and shape by name, as JSON.
      written: names of those of which this process writes its blocks.
    """

    forms: dict[str, Any]
    written: frozenset[str]


class VariableBlocks:
    """The blocks of variables that this process has; here each replica has every variable as a whole.

    Attributes:
      spans_processes: whether processes may have different blocks of a variable; all of them are then needed to read a
        full value.
    """

    spans_processes: bool = False

    def __init__(self, replicas: Replicas):
        """Initializes the blocks.

        Args:
          replicas: the strategy.
        """
        self._replicas = replicas

    def written(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Returns what this process saves of a variable: values on the host, each with its offset in the saved array.

        There is no communication. The blocks of all processes cover the variable without overlap.

        Args:
          variable: TensorFlow variable of this strategy.
          per_replica: whether each replica has its own value; the saved array then has an additional first dim over all
            replicas.
          copied: whether the values are copies; otherwise they may share the variable's memory, and need not be those of now
            once it is assigned.
        """
        read = _copied if copied else _shared
        values = [read(value) for value in self._replicas.local(variable)]
        if per_replica:
            return [
                ((replica, *(0,) * value.ndim), value[np.newaxis])
                for replica, value in zip(self._replicas.local_replicas, values, strict=True)
            ]
        return [((0,) * values[0].ndim, values[0])] if self._writes_same else []

    @property
    def _writes_same(self) -> bool:
        """Whether this process writes the variables that all replicas have with the same values."""
        return self._replicas.is_chief

    def of_all(self, forms: Mapping[str, Any]) -> VariablesOfAll:
        """Returns the variables of all processes, which may have different ones; every process must call it.

        Args:
          forms: dtype and shape of this process's variables by name, as JSON.
        """
        return VariablesOfAll(dict(forms), frozenset(forms))

    def copies(self, variable: tf.Variable) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """Returns all copies of a variable, or of its blocks, on this process's devices: (owner, offset, values).

        If replicas hold the same value, the copies of all processes with the same offset must be equal.
        """
        zeros = (0,) * len(variable.shape)
        own = zip(self._replicas.local_replicas, self._replicas.local(variable), strict=True)
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
        for replica, own in zip(self._replicas.local_replicas, self._replicas.local(variable), strict=True):
            own.assign(read((replica, *(0,) * len(shape)), (1, *shape))[0])

    def assign_value(self, variable: tf.Variable, per_replica: bool, value: np.ndarray) -> None:
        """Assigns a value to a variable on this process's devices, the same on all replicas.

        Args:
          variable: TensorFlow variable of this strategy.
          per_replica: as for `written`.
          value: the full value, in any dtype.
        """
        value = value.astype(variable.dtype.as_numpy_dtype)
        if per_replica:
            value = np.broadcast_to(value, (self._replicas.local_replicas.stop, *value.shape))
        self.assign(variable, per_replica, functools.partial(_block, value))

    def snapshot(self, variables: Sequence[tf.Variable]) -> Callable[[], None]:
        """Copies variables to the host, without communication; returns what assigns the copies, bit for bit.

        Each replica gets its own values back, even where replicas should hold the same value.

        Args:
          variables: TensorFlow variables of this strategy.
        """
        kept = [[_copied(value) for value in self._replicas.local(variable)] for variable in variables]

        def restore() -> None:
            for variable, values in zip(variables, kept, strict=True):
                for own, value in zip(self._replicas.local(variable), values, strict=True):
                    own.assign(value)

        return restore

    def full_variables(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context in which the chief can read the full variables, to save them; every process must enter it."""
        return contextlib.nullcontext()


def _block(values: np.ndarray, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    return values[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]


def _shared(value: Any) -> np.ndarray:
    """Returns a value on the host, which shares the memory of a variable on the host."""
    return np.asarray(tf.convert_to_tensor(value))


def _copied(value: Any) -> np.ndarray:
    """Copies a value to the host; TensorFlow copies a variable when it is read, but shares the memory of a tensor."""
    found = np.asarray(value)
    return found if found.flags.owndata else found.copy()
