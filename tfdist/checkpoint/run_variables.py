"""Saves the variables of a run in checkpoints, and restores them.

The prefix of a name determines how a value is restored on a different number of replicas:

    model/             replicated: weights, and integer state of layers
    optimizer/         replicated: the optimizer's state, the step, the learning rate
    state/             replicated: the loss scale, replicated state of compression
    local_model/, local_optimizer/
                       [replicas, ...]: weights and optimizer state of replicas that train locally. If the number changes,
                       or the new run has replicated weights, replicas get the mean; in a run of elastic averaging, which
                       evaluates the center variable, the weights are restored from it
    exchanges/         replicated: global weights, and the state of their optimizer
    local_exchanges/   [replicas, ...]: weights of each replica in transit, restored like local_model/
    statistics/        [replicas, ...]: moving statistics of each replica's rows; replicas get the mean
    replica_state/     [replicas, ...]: residuals of error feedback, whose sum over replicas is preserved: replica r of M
                       gets the sum of the residuals of r, r + M, r + 2 M ...
    tables/            replicated: rows by key, with their keys, counts and optimizer slots; see `KeyedTable.export`
    callbacks/         arrays of rank 0's callbacks, restored on all processes

With an unchanged number of replicas, each replica gets its own values, bit for bit.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.format import Checkpoint, TensorBlock
from tfdist.config.spec import unique_names
from tfdist.distribution.strategy import Read, Strategy
from tfdist.distribution.tf_distribute import strip_counters
from tfdist.errors import InputError
from tfdist.parameter_server.dynamic_embedding_tables import keyed_layers
from tfdist.step.state_store import StateArray, StateStore
from tfdist.synchronization import WeightSynchronizer

_MODEL, _OPTIMIZER, _STATE, _STATISTICS = "model/", "optimizer/", "state/", "statistics/"
_REPLICA_STATE, _EXCHANGES, _TABLES = "replica_state/", "exchanges/", "tables/"
_LOCAL = "local_"  # precedes the prefix of variables with a value per replica
_PER_REPLICA_PREFIXES = (_STATISTICS, _REPLICA_STATE, _LOCAL)
_AVERAGED_PREFIXES = (_STATISTICS, _LOCAL)  # restored as the mean on a different number of replicas
_COPIED_PREFIX = f"{_REPLICA_STATE}loss_scale/"  # a new replica gets the value of an old one
_MAX_DIFFERENCES = 10  # maximum number of reported differences between two models


class _RunVariable(NamedTuple):
    variable: tf.Variable  # None if another process has its value
    spec: tuple[str, tuple[int, ...]]  # dtype and shape
    per_replica: bool  # whether each replica has its own value
    is_local_only: bool = False  # whether no other replica has the variable; this process then writes it


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
        """Collects the variables of a compiled and built model, with a built optimizer."""
        self._strategy = strategy
        self._store = store
        self._callbacks = callbacks
        self._tables = {f"{_TABLES}{index}/": layer.table for index, layer in enumerate(keyed_layers(model))}
        moving_ids = {id(variable) for variable in keras_internals.moving_statistics(model)}
        statistics = [variable for variable in model.variables if id(variable) in moving_ids]
        replicated_variables = [variable for variable in model.variables if id(variable) not in moving_ids]
        has_local = exchanges.has_local_weights
        local_ids = {id(v) for v in (*model.trainable_variables, *model.optimizer.variables) if has_local}
        state, paths = model.optimizer.variables, keras_internals.paths_of_state(model.optimizer)
        variables = {
            **_variables_by_name(_MODEL, replicated_variables, local_ids),
            **_variables_by_name(_STATISTICS, statistics, moving_ids),
            **_variables_by_name(_OPTIMIZER, state, local_ids, strategy.optimizer_shards.is_local_only, paths),
        }
        self._local_specs = {name: entry.spec for name, entry in variables.items()}
        self._specs = self._local_specs  # after `collect`, the specs of all processes' variables
        # If the optimizer is sharded, other processes have its remaining variables.
        self._variables = {name: entry for name, entry in variables.items() if entry.variable is not None}
        exchanged, replica_ids = [*exchanges.variables, *exchanges.own_variables], {*map(id, exchanges.own_variables)}
        self._exchange_variables = _variables_by_name(_EXCHANGES, exchanged, replica_ids)
        self._names_to_write: frozenset[str] = frozenset()  # names of variables that this process writes; see `collect`

    def collect(self) -> None:
        """Collects the specs of all processes' variables, before saving or restoring; every process must call this."""
        specs = {**self._local_specs, **{name: entry.spec for name, entry in self._all_variables().items()}}
        json_specs = {name: [dtype, *shape] for name, (dtype, shape) in specs.items()}
        all_variables = self._strategy.blocks.job_variables(json_specs)
        kinds = (_MODEL, _STATISTICS, _OPTIMIZER)
        names = sorted(
            (name for name in all_variables.forms if name.removeprefix(_LOCAL).startswith(kinds)),
            key=lambda name: [name.removeprefix(_LOCAL).startswith(kind) for kind in kinds],
            reverse=True,
        )
        self._specs = {name: (all_variables.forms[name][0], tuple(all_variables.forms[name][1:])) for name in names}
        self._names_to_write = all_variables.local_names

    def parts(self, copied: bool = True) -> list[TensorBlock]:
        """Returns the blocks that this process writes, after `collect`. `copied` is as in `VariableBlocks.saved_blocks`."""
        return [
            part
            for name, entry in self._all_variables().items()
            if name in self._names_to_write
            for part in self._variable_parts(name, entry, copied)
        ] + [
            TensorBlock.full(prefix + name, array)
            for prefix, table in self._tables.items()
            if self._strategy.is_chief
            for name, array in table.export().items()
        ]

    def _all_variables(self) -> dict[str, _RunVariable]:
        states = {
            f"{_REPLICA_STATE if state.per_replica else _STATE}{state.name}": _RunVariable(
                variable, _variable_spec(variable), state.per_replica
            )
            for state, variable in self._store.items()
        }
        return {**self._variables, **self._exchange_variables, **states}

    def _variable_parts(self, name: str, entry: _RunVariable, copied: bool) -> list[TensorBlock]:
        if entry.is_local_only:
            return [TensorBlock.full(name, np.array(entry.variable))]
        shape = (*([self._strategy.replicas] if entry.per_replica else []), *entry.variable.shape)
        blocks = self._strategy.blocks.saved_blocks(entry.variable, entry.per_replica, copied)
        return [TensorBlock(name, shape, offset, values) for offset, values in blocks]

    def replicated_variables(self) -> dict[str, tf.Variable]:
        """Returns the replicated variables by name, except the random state of layers, which differs between replicas."""
        entries = self._all_variables().items()
        variables = {name: entry.variable for name, entry in entries if not (entry.per_replica or entry.is_local_only)}
        return {n: v for n, v in variables.items() if not n.partition("#")[0].endswith("seed_generator_state")}

    def replicated_parts(self, parts: Sequence[TensorBlock]) -> list[TensorBlock]:
        """Returns the replicated variables as complete tensors, taken from `parts` where possible."""
        saved, blocks = {part.name: part for part in parts}, self._strategy.blocks
        return [
            saved.get(n) or TensorBlock.full(n, blocks.copies(v)[0][2]) for n, v in self.replicated_variables().items()
        ]

    def restore(self, checkpoint: Checkpoint, with_optimizer: bool = True) -> None:
        """Restores all variables from a checkpoint, or all but the optimizer's; each process reads the blocks it needs.

        Raises:
          InputError: the checkpoint is of another model or optimizer; no variable has been changed.
          CorruptCheckpointError: the checkpoint is corrupted; some variables may have been changed.
        """
        names = self._match_names(checkpoint, (_MODEL, _STATISTICS, *([_OPTIMIZER] if with_optimizer else [])))
        self._callbacks.restore(checkpoint)
        names |= self._match_exchanges(checkpoint)
        variables, centers = {**self._variables, **self._exchange_variables}, _centers(checkpoint)
        for name, entry in ((name, variables[name]) for name in names):
            saved_name, replicas = names[name], self._strategy.replicas
            is_unchanged = _is_restored_unchanged(checkpoint, saved_name, entry.per_replica, replicas)
            saved_name = saved_name if is_unchanged else centers.get(saved_name, saved_name)
            read = _redistributing_reader(checkpoint, saved_name, entry.per_replica, replicas)
            self._strategy.blocks.assign(entry.variable, entry.per_replica, read)
        for prefix, table in self._tables.items():
            arrays = {n.removeprefix(prefix): _Rows(checkpoint, n) for n in checkpoint.tensors if n.startswith(prefix)}
            table.restore(arrays, with_slots=with_optimizer)
        states = {**self._states(checkpoint, _STATE), **self._states(checkpoint, _REPLICA_STATE)}
        self._store.restore(states, _describe_resize(checkpoint, self._strategy.replicas))

    def _states(self, checkpoint: Checkpoint, prefix: str) -> dict[str, StateArray]:
        per_replica = prefix == _REPLICA_STATE
        states = {}
        for name in (name for name in checkpoint.tensors if name.startswith(prefix)):
            shape = checkpoint.tensors[name].shape
            if per_replica:
                read = _redistributing_reader(checkpoint, name, True, self._strategy.replicas)
                zeros, row_shape = (0,) * (len(shape) - 1), (1, *shape[1:])
                values = np.concatenate([read((r, *zeros), row_shape) for r in self._strategy.local_replicas])
            else:
                values = checkpoint.read(name)
            states[name.removeprefix(prefix)] = StateArray(per_replica, values)
        return states

    def _match_names(self, checkpoint: Checkpoint, kinds: tuple[str, ...]) -> dict[str, str]:
        """Returns the names of a checkpoint's tensors by the names of this run's variables.

        They may differ in their numeric suffixes, because Keras numbers layers and optimizers of the same class within a
        process.
        """
        run_names = {name.removeprefix(_LOCAL): name for name in self._specs}
        saved_names = {name.removeprefix(_LOCAL): name for name in checkpoint.tensors}
        specs = {name: self._specs[run_name] for name, run_name in run_names.items() if name.startswith(kinds)}
        saved_specs = {n: _saved_spec(checkpoint, saved) for n, saved in saved_names.items() if n.startswith(kinds)}
        # A learning rate computed by a schedule is not a variable.
        for candidates, counterparts in ((specs, saved_specs), (saved_specs, specs)):
            if not any(map(_is_learning_rate, counterparts)):
                for name in filter(_is_learning_rate, list(candidates)):
                    del candidates[name]
        if specs == saved_specs:
            pairs = [(name, name) for name in specs]
        else:
            order = [name.removeprefix(_LOCAL) for name in checkpoint.values["order"]]
            names = [name for name in order if name in saved_specs]  # the mapping has no order
            has_same_names = [strip_counters(name) for name in names] == [strip_counters(name) for name in specs]
            if not has_same_names or [*specs.values()] != [saved_specs.get(name) for name in names]:
                raise InputError(
                    "The checkpoint must have the same model and optimizer as this run. Received: "
                    f"{checkpoint.path}, which differs: {_differences(specs, saved_specs)}. Use the flags of the run that "
                    "wrote it, or --resume=never."
                )
            pairs = list(zip(specs, names, strict=True))
        return {run_names[name]: saved_names[saved] for name, saved in pairs if run_names[name] in self._variables}

    def _match_exchanges(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Same as `_match_names`, for the variables of weight exchanges; empty if the checkpoint has none."""
        saved_names = [name for name in checkpoint.values["order"] if name.removeprefix(_LOCAL).startswith(_EXCHANGES)]
        saved_specs = [_saved_spec(checkpoint, name) for name in saved_names]
        if [entry.spec for entry in self._exchange_variables.values()] != saved_specs:
            if saved_names and self._exchange_variables:
                raise InputError(
                    "A run must resume with the `sync` method with which it was saved. Received: the checkpoint "
                    f"{checkpoint.path}, with other global weights or another outer optimizer. Use the same `sync` as the "
                    "run that wrote it."
                )
            return {}
        return dict(zip(self._exchange_variables, saved_names, strict=True))

    @property
    def order(self) -> list[str]:
        """Names of the model's, optimizer's and exchanges' variables, in the order stored in a checkpoint."""
        return [*self._specs, *self._exchange_variables]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a tensor in a checkpoint, which are read when they are sliced."""

    checkpoint: Checkpoint
    name: str

    def __getitem__(self, rows: slice) -> np.ndarray:
        shape = self.checkpoint.tensors[self.name].shape
        begin, end, _ = rows.indices(shape[0])
        offset = (begin, *(0 for _ in shape[1:]))
        return self.checkpoint.read_block(self.name, offset, (end - begin, *shape[1:]))


def _variables_by_name(
    prefix: str,
    variables: Sequence[keras.Variable],
    per_replica: Collection[int],
    is_local_only: Callable[[keras.Variable], bool] = lambda variable: False,
    paths: Sequence[str] = (),
) -> dict[str, _RunVariable]:
    """Returns variables by name. A name is the prefix and the path of a variable, by default Keras's path.

    `per_replica` contains the ids of variables with a separate value on each replica; `is_local_only` returns whether only
    this replica has a variable.
    """
    variable_paths = paths or [variable.path for variable in variables]
    variables_by_name = unique_names((f"{prefix}{path}", v) for path, v in zip(variable_paths, variables, strict=True))
    return {
        f"{_LOCAL if id(v) in per_replica and prefix != _STATISTICS else ''}{name}": _RunVariable(
            keras_internals.value_of(v), _variable_spec(v), id(v) in per_replica, is_local_only(v)
        )
        for name, v in variables_by_name.items()
    }


def _saved_spec(checkpoint: Checkpoint, name: str) -> tuple[str, tuple[int, ...]]:
    entry = checkpoint.tensors[name]
    return entry.dtype, entry.shape[1:] if name.startswith(_PER_REPLICA_PREFIXES) else entry.shape


def _variable_spec(variable: tf.Variable | keras.Variable) -> tuple[str, tuple[int, ...]]:
    return tf.as_dtype(variable.dtype).name, tuple(variable.shape)


def _is_learning_rate(name: str) -> bool:
    return name.startswith(_OPTIMIZER) and name.endswith("/learning_rate")


def _differences(specs: Mapping[str, tuple], saved_specs: Mapping[str, tuple]) -> str:
    def describe(specs: Mapping[str, tuple], name: str) -> str:
        return "missing" if name not in specs else f"{specs[name][0]}{list(specs[name][1])}"

    differences = [
        f"{name} is {describe(saved_specs, name)} in the checkpoint and {describe(specs, name)} in the model"
        for name in {**saved_specs, **specs}
        if specs.get(name) != saved_specs.get(name)
    ]
    suffix = f" and {len(differences) - _MAX_DIFFERENCES} more" if len(differences) > _MAX_DIFFERENCES else ""
    return (
        "; ".join(differences[:_MAX_DIFFERENCES]) + suffix if differences else "the variables are in a different order"
    )


def _describe_resize(checkpoint: Checkpoint, replicas: int) -> str:
    """Describes how values per replica are redistributed to a different number of replicas; "" if it is unchanged."""
    entries = (entry for name, entry in checkpoint.tensors.items() if name.startswith(_REPLICA_STATE))
    old_count = next((entry.shape[0] for entry in entries), replicas)
    if old_count == replicas:
        return ""
    message = f"{replicas} replicas resume a run with {old_count}: the sum of all compression residuals is preserved"
    if old_count > replicas:
        return f"{message}; replica r also gets those of r + {replicas}, r + {2 * replicas}, ..."
    return f"{message}; replicas from {old_count} on start with zeros."


def _centers(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the names of the global weights by the names of the replicas' weights; empty unless the run evaluates them."""
    order = checkpoint.values["order"]
    if not checkpoint.values["exchanges"].get("center"):
        return {}
    local_names, center_names = ([n for n in order if n.startswith(prefix)] for prefix in (_LOCAL + _MODEL, _EXCHANGES))
    return dict(zip(local_names, center_names, strict=False))  # both are in the order of the trainable variables


def _is_restored_unchanged(checkpoint: Checkpoint, name: str, per_replica: bool, replicas: int) -> bool:
    is_same_kind = name.startswith(_PER_REPLICA_PREFIXES) == per_replica
    return is_same_kind and (not per_replica or checkpoint.tensors[name].shape[0] == replicas)


def _redistributing_reader(checkpoint: Checkpoint, name: str, per_replica: bool, replicas: int) -> Read:
    """Returns the function with which `VariableBlocks.assign` reads a tensor of a checkpoint.

    It redistributes values if this run has a different number of replicas, or if only one of the two runs has a value per
    replica.
    """
    shape, saved_per_replica = checkpoint.tensors[name].shape, name.startswith(_PER_REPLICA_PREFIXES)
    if _is_restored_unchanged(checkpoint, name, per_replica, replicas):
        return lambda offset, block: checkpoint.read_block(name, offset, block)

    def read_shared(offset: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
        return checkpoint.read_block(name, offset[1:], block[1:])[np.newaxis]

    def merge_rows(offset: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
        if name.startswith(_COPIED_PREFIX):
            return checkpoint.read_block(name, (offset[0] % shape[0], *offset[1:]), block)
        is_mean = name.startswith(_AVERAGED_PREFIXES)
        rows = range(0 if is_mean else offset[0], shape[0], 1 if is_mean else replicas)
        blocks = [checkpoint.read_block(name, (row, *offset[1:]), block) for row in rows]
        if not blocks:  # a new replica has no residual
            return np.zeros(block, checkpoint.read_block(name, (0, *offset[1:]), block).dtype)
        if len(blocks) == 1:
            return blocks[0]
        total = np.sum(np.stack(blocks).astype(np.float64), axis=0)
        return (total / len(blocks) if is_mean else total).astype(blocks[0].dtype)

    if not saved_per_replica:
        return read_shared
    return merge_rows if per_replica else lambda offset, block: merge_rows((0, *offset), (1, *block))[0]
