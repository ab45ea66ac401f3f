"""The variables of a run by name, as the blocks that this process has.

The prefix of a name determines what happens to a value if the number of replicas changes:

    model/             replicated: weights, and integers that layers keep
    optimizer/         replicated: the optimizer's state, the step, the learning rate
    state/             replicated: the loss scale, numbers that compression keeps
    local_model/, local_optimizer/
                       [replicas, ...]: weights and optimizer state of replicas that train locally; if the number changes,
                       or the run continues with weights that are equal, all get their mean; of a run that evaluates a
                       center, weights get the center
    exchanges/         replicated: global weights, and the state of their optimizer
    local_exchanges/   [replicas, ...]: weights of each replica that were sent and are not used yet, as local_model/
    statistics/        [replicas, ...]: moving statistics of each replica's rows; new replicas get their mean
    replica_state/     [replicas, ...]: what error feedback has not sent yet; the sum over replicas is preserved:
                       replica r of M gets those of r, r + M, r + 2 M ...
    callbacks/         arrays of rank 0's callbacks, restored on all processes

With an unchanged number of replicas, each gets its own values back, bit for bit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.format import Checkpoint, Part
from tfdist.config.spec import unique_names
from tfdist.distribution.strategy import Read, Strategy
from tfdist.distribution.tf_distribute import without_numbers
from tfdist.errors import InputError
from tfdist.step.state_store import StateArray, StateStore
from tfdist.synchronization import WeightSynchronizer

_MODEL, _OPTIMIZER, _STATE, _STATISTICS, _REPLICA_STATE, _EXCHANGES = (
    "model/",
    "optimizer/",
    "state/",
    "statistics/",
    "replica_state/",
    "exchanges/",
)
_LOCAL = "local_"  # before the prefix of variables of which each replica has its own value
_PER_REPLICA = (_STATISTICS, _REPLICA_STATE, _LOCAL)
_AVERAGED = (_STATISTICS, _LOCAL)  # a value that no replica has is the mean
_COPIED = f"{_REPLICA_STATE}loss_scale/"  # a new replica gets the value of another one
_MAX_LISTED = 10  # maximum number of reported differences between two models


class _RunVariable(NamedTuple):
    """A variable of this process.

    Attributes:
      variable: the TensorFlow variable; None if another process has its value.
      form: dtype and shape.
      per_replica: whether each replica has its own value.
      is_here_only: whether no other replica has it, so that this process writes it.
    """

    variable: tf.Variable
    form: tuple[str, tuple[int, ...]]
    per_replica: bool
    is_here_only: bool = False


class RunVariables:
    """The variables of one model, its optimizer and its steps, under one strategy."""

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        store: StateStore,
        callbacks: CallbackStates,
        exchanges: WeightSynchronizer,
    ):
        """Collects the variables of a model.

        Args:
          model: compiled and built, with a built optimizer.
          strategy: the model's strategy.
          store: other state of the steps.
          callbacks: state of the callbacks.
          exchanges: exchanges between replicas.
        """
        self._strategy = strategy
        self._store = store
        self._callbacks = callbacks
        moving = {id(variable) for variable in keras_internals.moving_statistics(model)}
        statistics = [variable for variable in model.variables if id(variable) in moving]
        replicated = [variable for variable in model.variables if id(variable) not in moving]
        local = {id(v) for v in (*model.trainable_variables, *model.optimizer.variables) if exchanges.has_local_weights}
        state, paths = model.optimizer.variables, keras_internals.paths_of_state(model.optimizer)
        of_optimizer = _named(_OPTIMIZER, state, local, strategy.optimizer_shards.is_here_only, paths)
        variables = {**_named(_MODEL, replicated, local), **_named(_STATISTICS, statistics, moving), **of_optimizer}
        self._own_forms = {name: entry.form for name, entry in variables.items()}
        self._forms = self._own_forms  # of all processes; see `collect`
        # Of a sharded optimizer, other processes have the rest.
        self._variables = {name: entry for name, entry in variables.items() if entry.variable is not None}
        differing = {id(variable) for variable in exchanges.own_variables}
        self._exchanged = _named(_EXCHANGES, [*exchanges.variables, *exchanges.own_variables], differing)
        self._written_names: frozenset[str] = frozenset()  # names; see `collect`

    def collect(self) -> None:
        """Learns which variables other processes have, before the run is saved or restored; every process must call it."""
        forms = {**self._own_forms, **{name: entry.form for name, entry in self._all_variables().items()}}
        of_all = self._strategy.blocks.of_all({name: [dtype, *shape] for name, (dtype, shape) in forms.items()})
        kinds = (_MODEL, _STATISTICS, _OPTIMIZER)
        ordered = sorted(
            (name for name in of_all.forms if name.removeprefix(_LOCAL).startswith(kinds)),
            key=lambda name: [name.removeprefix(_LOCAL).startswith(kind) for kind in kinds],
            reverse=True,
        )
        self._forms = {name: (of_all.forms[name][0], tuple(of_all.forms[name][1:])) for name in ordered}
        self._written_names = of_all.written

    def parts(self, copied: bool = True) -> list[Part]:
        """Returns the blocks that this process writes, on the host, after `collect`; `copied`: see `VariableBlocks.written`."""
        return [
            Part(name, self._saved_shape(entry), offset, values)
            for name, entry in self._all_variables().items()
            if name in self._written_names
            for offset, values in self._blocks_written(entry, copied)
        ]

    def _all_variables(self) -> dict[str, _RunVariable]:
        """Returns all variables of this process by name."""
        states = {
            f"{_REPLICA_STATE if state.per_replica else _STATE}{state.name}": _RunVariable(
                variable, _form(variable), state.per_replica
            )
            for state, variable in self._store.items()
        }
        return {**self._variables, **self._exchanged, **states}

    def _blocks_written(self, entry: _RunVariable, copied: bool) -> list[tuple[tuple[int, ...], np.ndarray]]:
        if entry.is_here_only:
            return [((0,) * len(entry.form[1]), np.array(entry.variable))]
        return self._strategy.blocks.written(entry.variable, entry.per_replica, copied)

    def replicated(self) -> dict[str, tf.Variable]:
        """Returns the replicated variables by name, except states of random layers, which differ between replicas."""
        store = {f"{_STATE}{state.name}": variable for state, variable in self._store.items() if not state.per_replica}
        named = {**self._variables, **self._exchanged}.items()
        replicated = {name: entry.variable for name, entry in named if not (entry.per_replica or entry.is_here_only)}
        return {
            name: v
            for name, v in {**replicated, **store}.items()
            if not name.partition("#")[0].endswith("seed_generator_state")
        }

    def replicated_parts(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the replicated variables as complete tensors: from `parts`, else copies of this process's values."""
        copied = {part.name: part for part in parts}
        return [copied.get(name) or self._full_part(name, variable) for name, variable in self.replicated().items()]

    def _full_part(self, name: str, variable: tf.Variable) -> Part:
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
        names |= self._exchanges_in(checkpoint)
        variables, centers = {**self._variables, **self._exchanged}, _centers(checkpoint)
        for name, entry in ((name, variables[name]) for name in names):
            saved, replicas = names[name], self._strategy.replicas
            if saved in centers and not _as_saved(checkpoint, saved, entry.per_replica, replicas):
                saved = centers[saved]
            read = _reader(checkpoint, saved, entry.per_replica, replicas)
            self._strategy.blocks.assign(entry.variable, entry.per_replica, read)
        states = {**self._states(checkpoint, _STATE), **self._states(checkpoint, _REPLICA_STATE)}
        self._store.restore(states, _resized(checkpoint, self._strategy.replicas))

    def _states(self, checkpoint: Checkpoint, prefix: str) -> dict[str, StateArray]:
        per_replica = prefix == _REPLICA_STATE
        states = {}
        for name in (name for name in checkpoint.tensors if name.startswith(prefix)):
            shape = checkpoint.tensors[name].shape
            if per_replica:
                read = _reader(checkpoint, name, True, self._strategy.replicas)
                zeros, one = (0,) * (len(shape) - 1), (1, *shape[1:])
                values = np.concatenate([read((r, *zeros), one) for r in self._strategy.local_replicas])
            else:
                values = checkpoint.read(name)
            states[name.removeprefix(prefix)] = StateArray(per_replica, values)
        return states

    def _saved_shape(self, entry: _RunVariable) -> tuple[int, ...]:
        shape = tuple(entry.variable.shape)
        return (self._strategy.replicas, *shape) if entry.per_replica else shape

    def _names_in(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Returns the names of a checkpoint's tensors by the names of the variables here.

        They may differ in numbers, because Keras counts layers and optimizers of the same kind in a process.
        """
        local_here = {name.removeprefix(_LOCAL): name for name in self._forms}
        local_there = {name.removeprefix(_LOCAL): name for name in checkpoint.tensors}
        here = {name: self._forms[own] for name, own in local_here.items()}
        there = {
            name: _form_in(checkpoint, saved)
            for name, saved in local_there.items()
            if name.startswith((_MODEL, _STATISTICS, _OPTIMIZER))
        }
        for one, other in ((here, there), (there, here)):  # a learning rate computed by a schedule is not a variable
            if not any(map(_is_rate, other)):
                for name in filter(_is_rate, list(one)):
                    del one[name]
        if here == there:
            return {own: local_there[name] for name in here if (own := local_here[name]) in self._variables}
        order = [name.removeprefix(_LOCAL) for name in checkpoint.values["order"]]
        saved = [name for name in order if name in there]  # in the order that the mapping has lost
        same = [without_numbers(name) for name in saved] == [without_numbers(name) for name in here]
        if same and [*here.values()] == [there.get(name) for name in saved]:
            pairs = zip(here, saved, strict=True)
            return {local_here[own]: local_there[name] for own, name in pairs if local_here[own] in self._variables}
        raise InputError(
            f"A checkpoint must be of the same model and optimizer. Received: {checkpoint.path}, which differs: "
            f"{_differences(here, there)}. Use the flags of its run, or --resume=never."
        )

    def _exchanges_in(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Same as `_names_in` for the exchanges; empty if the run in the checkpoint had none, or others."""
        saved = [name for name in checkpoint.values["order"] if name.removeprefix(_LOCAL).startswith(_EXCHANGES)]
        if [entry.form for entry in self._exchanged.values()] != [_form_in(checkpoint, name) for name in saved]:
            if saved and self._exchanged:
                raise InputError(
                    "A run must resume with the same method of exchanging weights. Received: the checkpoint "
                    f"{checkpoint.path}, with other global weights or another outer optimizer. Use the `sync` of its run."
                )
            return {}
        return dict(zip(self._exchanged, saved, strict=True))

    @property
    def order(self) -> list[str]:
        """Names of the model's, optimizer's and exchanges' variables, in the order stored in a checkpoint."""
        return [*self._forms, *self._exchanged]


def _named(
    prefix: str,
    variables: Sequence[keras.Variable],
    per_replica: Collection[int],
    is_here_only: Callable[[keras.Variable], bool] = lambda variable: False,
    paths: Sequence[str] = (),
) -> dict[str, _RunVariable]:
    """Returns variables by name.

    Args:
      prefix: begins the names.
      variables: the variables.
      per_replica: ids of those of which each replica has its own value.
      is_here_only: returns whether no other replica has a variable.
      paths: paths of the variables; by default Keras's.
    """
    variable_paths = paths or [variable.path for variable in variables]
    named = unique_names((f"{prefix}{path}", v) for path, v in zip(variable_paths, variables, strict=True))
    return {
        f"{_LOCAL if id(v) in per_replica and prefix != _STATISTICS else ''}{name}": _RunVariable(
            keras_internals.value_of(v), _form(v), id(v) in per_replica, is_here_only(v)
        )
        for name, v in named.items()
    }


def _form_in(checkpoint: Checkpoint, name: str) -> tuple[str, tuple[int, ...]]:
    entry = checkpoint.tensors[name]
    return entry.dtype, entry.shape[1:] if name.startswith(_PER_REPLICA) else entry.shape


def _form(variable: tf.Variable | keras.Variable) -> tuple[str, tuple[int, ...]]:
    return tf.as_dtype(variable.dtype).name, tuple(variable.shape)


def _is_rate(name: str) -> bool:
    return name.startswith(_OPTIMIZER) and name.endswith("/learning_rate")


def _differences(here: Mapping[str, tuple], there: Mapping[str, tuple]) -> str:
    """Describes names that only one of them has, and differences in shape or dtype."""
    differences = [
        *(f"{name} {_form_text(*there[name])} is not in the model" for name in there if name not in here),
        *(f"{name} {_form_text(*here[name])} is not in the checkpoint" for name in here if name not in there),
        *(
            f"{name} is {_form_text(*there[name])} in the checkpoint and {_form_text(*form)} in the model"
            for name, form in here.items()
            if name in there and there[name] != form
        ),
    ]
    more = f" and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
    return "; ".join(differences[:_MAX_LISTED]) + more if differences else "in the order of variables"


def _form_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _resized(checkpoint: Checkpoint, replicas: int) -> str:
    """Describes how values per replica are redistributed if the number of replicas changes; "" if it does not."""
    entries = (entry for name, entry in checkpoint.tensors.items() if name.startswith(_REPLICA_STATE))
    before = next((entry.shape[0] for entry in entries), replicas)
    if before == replicas:
        return ""
    message = (
        f"{replicas} replicas resume a run of {before}: what compression has not sent yet keeps its sum over replicas"
    )
    if before > replicas:
        return f"{message}; replica r takes over that of r + {replicas}, r + {2 * replicas}, ..."
    return f"{message}; replicas from {before} on start with zeros."


def _centers(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the names of global weights by those of the replicas' weights, if the run evaluates the former."""
    order = checkpoint.values["order"]
    if not checkpoint.values["exchanges"].get("center"):
        return {}
    local, center = ([n for n in order if n.startswith(prefix)] for prefix in (_LOCAL + _MODEL, _EXCHANGES))
    return dict(zip(local, center, strict=False))  # both in the order of the trainable variables


def _as_saved(checkpoint: Checkpoint, name: str, per_replica: bool, replicas: int) -> bool:
    """Returns whether a tensor is restored as it was saved; arguments as of `_reader`."""
    same_kind = name.startswith(_PER_REPLICA) == per_replica
    return same_kind and (not per_replica or checkpoint.tensors[name].shape[0] == replicas)


def _reader(checkpoint: Checkpoint, name: str, per_replica: bool, replicas: int) -> Read:
    """Returns a reader for `VariableBlocks.assign` that redistributes values if the number of replicas has changed.

    Args:
      checkpoint: the checkpoint.
      name: name of the tensor in it.
      per_replica: whether each replica here has its own value.
      replicas: number of replicas here.
    """
    shape, saved_per_replica = checkpoint.tensors[name].shape, name.startswith(_PER_REPLICA)
    if _as_saved(checkpoint, name, per_replica, replicas):
        return lambda offset, block: checkpoint.read_block(name, offset, block)

    def shared(offset: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
        return checkpoint.read_block(name, offset[1:], block[1:])[np.newaxis]

    def merged(offset: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
        if not per_replica:
            return merged_rows((0, *offset), (1, *block))[0]
        return merged_rows(offset, block)

    def merged_rows(offset: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
        if name.startswith(_COPIED):
            return checkpoint.read_block(name, (offset[0] % shape[0], *offset[1:]), block)
        is_mean = name.startswith(_AVERAGED)
        rows = range(0 if is_mean else offset[0], shape[0], 1 if is_mean else replicas)
        blocks = [checkpoint.read_block(name, (row, *offset[1:]), block) for row in rows]
        if not blocks:  # a new replica has nothing left to send
            return np.zeros(block, checkpoint.read_block(name, (0, *offset[1:]), block).dtype)
        if len(blocks) == 1:
            return blocks[0]
        total = np.sum(np.stack(blocks).astype(np.float64), axis=0)
        return (total / len(blocks) if is_mean else total).astype(blocks[0].dtype)

    return merged if saved_per_replica else shared
