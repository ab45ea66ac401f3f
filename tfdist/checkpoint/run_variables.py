"""The variables of a run by name, as the blocks that this process has.

The prefix of a name determines what happens to a value if the number of replicas changes:

    model/             replicated: weights, and integers that layers keep
    optimizer/         replicated: the optimizer's state, the step, the learning rate
    state/             replicated: the loss scale, numbers that compression keeps
    statistics/        [replicas, ...]: moving statistics of each replica's rows; new replicas get their mean
    replica_state/     [replicas, ...]: what error feedback has not sent yet; the sum over replicas is preserved:
      replica r
                       of M gets those of r, r + M, r + 2 M ...
    callbacks/         arrays of rank 0's callbacks, restored on all processes

With an unchanged number of replicas, each gets its own values back, bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.format import Checkpoint, Part
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.variable_blocks import Read
from tfdist.distribution.variable_creation import without_numbers
from tfdist.errors import InputError
from tfdist.grammar.unique_names import unique_names
from tfdist.step.state_store import StateArray, StateStore

_MODEL, _OPTIMIZER, _STATE, _STATISTICS, _REPLICA_STATE = (
    "model/",
    "optimizer/",
    "state/",
    "statistics/",
    "replica_state/",
)
_NAMED_AT_MOST = 10  # maximum number of reported differences between two models


class _RunVariable(NamedTuple):
    """A TensorFlow variable, and whether each replica has its own value."""

    variable: tf.Variable
    per_replica: bool


class RunVariables:
    """The variables of one model, its optimizer and its steps, under one strategy."""

    def __init__(self, model: keras.Model, strategy: Strategy, store: StateStore, callbacks: CallbackStates):
        """Collects the variables of a model.

        Args:
          model: compiled and built, with a built optimizer.
          strategy: the model's strategy.
          store: other state of the steps.
          callbacks: state of the callbacks.
        """
        self._strategy = strategy
        self._store = store
        self._callbacks = callbacks
        moving = {id(variable) for variable in keras_internals.moving_statistics(model)}
        own = [variable for variable in model.variables if id(variable) in moving]
        replicated = [variable for variable in model.variables if id(variable) not in moving]
        self._variables = {
            **_named(_MODEL, replicated, False),
            **_named(_STATISTICS, own, True),
            **_named(_OPTIMIZER, model.optimizer.variables, False),
        }

    def parts(self) -> list[Part]:
        """Returns copies on the host of the blocks that this process writes, without communication."""
        states = {
            f"{_REPLICA_STATE if state.per_replica else _STATE}{state.name}": _RunVariable(variable, state.per_replica)
            for state, variable in self._store.items()
        }
        return [
            Part(name, self._saved_shape(held), offset, values)
            for name, held in {**self._variables, **states}.items()
            for offset, values in self._strategy.blocks.written(held.variable, held.per_replica)
        ]

    def replicated(self) -> dict[str, tf.Variable]:
        """Returns the replicated variables by name, except states of random layers, which differ between replicas."""
        store = {f"{_STATE}{state.name}": variable for state, variable in self._store.items() if not state.per_replica}
        own = {name: held.variable for name, held in self._variables.items() if not held.per_replica}
        return {
            name: v
            for name, v in {**own, **store}.items()
            if not name.partition("#")[0].endswith("seed_generator_state")
        }

    def replicated_parts(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the replicated variables as complete tensors: from `parts`, else copies of this process's values."""
        there = {part.name: part for part in parts}
        return [there.get(name) or self._whole(name, variable) for name, variable in self.replicated().items()]

    def _whole(self, name: str, variable: tf.Variable) -> Part:
        [(_, _, values), *_] = self._strategy.blocks.copies(variable)
        return Part.full(name, values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores every variable from a checkpoint; each process reads what it needs.

        Raises:
          InputError: the checkpoint is of another model or optimizer; nothing was changed.
          CorruptCheckpointError: the checkpoint is corrupted; some variables may have been changed.
        """
        names = self._names_in(checkpoint)
        self._callbacks.restore(checkpoint)
        for name, held in ((name, self._variables[name]) for name in names):
            read = _reader(checkpoint, names[name], held.per_replica, self._strategy.replicas)
            self._strategy.blocks.assign(held.variable, held.per_replica, read)
        states = {**self._states(checkpoint, _STATE), **self._states(checkpoint, _REPLICA_STATE)}
        self._store.restore(states, _resized(checkpoint, self._strategy.replicas))

    def _states(self, checkpoint: Checkpoint, prefix: str) -> dict[str, StateArray]:
        per_replica = prefix == _REPLICA_STATE
        found = {}
        for name in (name for name in checkpoint.tensors if name.startswith(prefix)):
            shape = checkpoint.tensors[name].shape
            if per_replica:
                read = _reader(checkpoint, name, True, self._strategy.replicas)
                zeros, one = (0,) * (len(shape) - 1), (1, *shape[1:])
                values = np.concatenate([read((r, *zeros), one) for r in self._strategy.local_replicas])
            else:
                values = checkpoint.read(name)
            found[name.removeprefix(prefix)] = StateArray(per_replica, values)
        return found

    def _saved_shape(self, held: _RunVariable) -> tuple[int, ...]:
        shape = tuple(held.variable.shape)
        return (self._strategy.replicas, *shape) if held.per_replica else shape

    def _names_in(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Returns the names of a checkpoint's tensors by the names of the variables here.

        They may differ in numbers, because Keras counts layers and optimizers of the same kind in a process.
        """
        here = {name: _form(held) for name, held in self._variables.items()}
        there = {
            name: (entry.dtype, entry.shape[1:] if name.startswith(_STATISTICS) else entry.shape)
            for name, entry in checkpoint.tensors.items()
            if name.startswith((_MODEL, _STATISTICS, _OPTIMIZER))
        }
        for one, other in ((here, there), (there, here)):  # a learning rate computed by a schedule is not a variable
            if not any(map(_is_rate, other)):
                for name in filter(_is_rate, list(one)):
                    del one[name]
        if here == there:
            return {name: name for name in here}
        saved = [name for name in checkpoint.values["order"] if name in there]  # in the order that the mapping has lost
        replicated = [without_numbers(name) for name in here] == [without_numbers(name) for name in saved]
        if replicated and [*here.values()] == [there.get(name) for name in saved]:
            return dict(zip(here, saved, strict=True))
        raise InputError(
            f"A checkpoint must be of the same model and optimizer. Received: {checkpoint.path}, which differs: "
            f"{_differences(here, there)}. Use the flags of its run, or --resume=never."
        )

    @property
    def order(self) -> list[str]:
        """Names of the model's and optimizer's variables, in the order stored in a checkpoint."""
        return list(self._variables)


def _named(prefix: str, variables: list[keras.Variable], per_replica: bool) -> dict[str, _RunVariable]:
    held = ((f"{prefix}{v.path}", _RunVariable(keras_internals.value_of(v), per_replica)) for v in variables)
    return unique_names(held)


def _form(held: _RunVariable) -> tuple[str, tuple[int, ...]]:
    return held.variable.dtype.name, tuple(held.variable.shape)


def _is_rate(name: str) -> bool:
    return name.startswith(_OPTIMIZER) and name.endswith("/learning_rate")


def _differences(here: Mapping[str, tuple], there: Mapping[str, tuple]) -> str:
    """Describes names that only one of them has, and differences in shape or dtype."""
    said = [
        *(f"{name} {_written(*there[name])} is not in the model" for name in there if name not in here),
        *(f"{name} {_written(*here[name])} is not in the checkpoint" for name in here if name not in there),
        *(
            f"{name} is {_written(*there[name])} in the checkpoint and {_written(*form)} in the model"
            for name, form in here.items()
            if name in there and there[name] != form
        ),
    ]
    more = f" and {len(said) - _NAMED_AT_MOST} more" if len(said) > _NAMED_AT_MOST else ""
    return "; ".join(said[:_NAMED_AT_MOST]) + more if said else "in the order of variables"


def _written(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _resized(checkpoint: Checkpoint, replicas: int) -> str:
    """Describes how values per replica are redistributed if the number of replicas changes; "" if it does not."""
    entries = (entry for name, entry in checkpoint.tensors.items() if name.startswith(_REPLICA_STATE))
    before = next((entry.shape[0] for entry in entries), replicas)
    if before == replicas:
        return ""
    what = (
        f"{replicas} replicas resume a run of {before}: what compression has not sent yet keeps its sum over replicas"
    )
    if before > replicas:
        return f"{what}; replica r takes over that of r + {replicas}, r + {2 * replicas}, ..."
    return f"{what}; replicas from {before} on start with zeros."


def _reader(checkpoint: Checkpoint, name: str, per_replica: bool, replicas: int) -> Read:
    """Returns a reader for `VariableBlocks.assign` that redistributes values if the number of replicas has changed."""
    shape = checkpoint.tensors[name].shape
    if not per_replica or shape[0] == replicas:
        return lambda offset, block: checkpoint.read_block(name, offset, block)

    def merged(offset: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
        step = 1 if name.startswith(_STATISTICS) else replicas
        first = 0 if name.startswith(_STATISTICS) else offset[0]
        rows = [checkpoint.read_block(name, (row, *offset[1:]), block) for row in range(first, shape[0], step)]
        if not rows:  # a new replica has nothing left to send
            return np.zeros(block, checkpoint.read_block(name, (0, *offset[1:]), block).dtype)
        if len(rows) == 1:
            return rows[0]
        total = np.sum(np.stack(rows).astype(np.float64), axis=0)
        return (total / len(rows) if name.startswith(_STATISTICS) else total).astype(rows[0].dtype)

    return merged
