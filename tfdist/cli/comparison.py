"""Compares a strategy's training with that of a single device, step by step and variable by variable.

Both start from the same weights and use the same global batches. Every variable is compared after every step by
||a - b|| / ||b||. The weights after each of the strategy's steps are kept on the host until the reference has made the same
step, so this needs memory for (steps + 1) copies of the model, and for twice as many in bfloat16.

In bfloat16 a relative norm is not meaningful: a bias near zero, or a variable whose gradient is only rounding error, which
Adam scales to full steps, may differ by 100%. In this case, the reference is also trained in float32, and differences are
measured in roundings: multiples of the difference between 16 and 32 bits on one device.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals, models
from tfdist.cli.run import Session, make_trainer, warn_about_flags
from tfdist.cluster.environment import Cluster
from tfdist.config.staleness import LAZY, SYNC
from tfdist.config.strategy_registry import REFERENCE
from tfdist.config.train_config import VerifyConfig
from tfdist.coordination import LocalGroup
from tfdist.data import Pipeline
from tfdist.data.batches import count_rows
from tfdist.distribution.factory import create
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Clip
from tfdist.gradients.compression import EXACT
from tfdist.parameter_server.dynamic_embedding_tables import keyed_layers
from tfdist.parameter_server.pushed_gradients import PushReducer
from tfdist.parameter_server.servers import BY_ROWS
from tfdist.parameter_server.table_rows import split
from tfdist.parameter_server.update_order import Update
from tfdist.reporting.warn_once import warn_once
from tfdist.row_semantics.declarations import check_declarations
from tfdist.row_semantics.explanation import Explanation, using_listener
from tfdist.step.compiled_loop import Loop, LoopResult, MakeLoop, compile_loop, split_example_indices
from tfdist.step.compiled_steps import Steps
from tfdist.step.gradient_source import GradientSource
from tfdist.step.metrics import ModelMetrics
from tfdist.step.reduction import global_norm
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.synchronization import WeightSynchronizer
from tfdist.testing import digest
from tfdist.trainer.options import Schedule
from tfdist.trainer.run_warnings import ONE_DEVICE
from tfdist.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Replay(WeightSynchronizer):
    """Steps of one device, with delayed gradients, in the order of recorded updates."""

    model: keras.Model  # a model with the weights before the first update
    strategy: Strategy  # strategy of one device
    updates: Sequence[Update]  # all updates of the recorded run, in order
    placement: Sequence[int]  # see `Servers.placement`
    methods: Sequence[str]  # see `ServerSynchronizer.methods`
    batch_parts: int = 1  # number of workers between which a batch is divided; 1 for updates of whole batches

    def batches(self, pipeline: Pipeline, strategy: Strategy) -> Iterator[Any]:
        """See base class. Yields the parts of each batch, one for each worker."""
        return strategy.distribute(lambda *_: pipeline.indexed_dataset(range(self.batch_parts), self.batch_parts))

    def loop(self, steps: Steps, batch_size: int | None, rate: float, step: int, make: MakeLoop = compile_loop) -> Loop:

        def create(settings: Settings, store: StateStore, metrics: ModelMetrics) -> tuple[Step, Loop]:
            # Servers clip the sum of the gradients of a batch's parts.
            step_clip, sum_clip = (settings.clip, Clip()) if self.batch_parts == 1 else (Clip(), settings.clip)
            settings = dataclasses.replace(settings, batch_size=batch_size, clip=step_clip)
            worker = tf.Variable(0)
            source = GradientSource(self.model, self.strategy, store, settings, metrics)
            replay_step = Step(source, PushReducer(self.methods, worker), store)
            return replay_step, ReplayLoop(self, replay_step, worker, sum_clip)

        return steps.custom_loop("replay", create)


class _Snapshot(NamedTuple):
    """The weights and states after an update, and the contents of embedding tables with a row for each key."""

    values: list[np.ndarray]
    tables: list[dict[str, np.ndarray]]


class ReplayLoop:
    """A `Loop` that keeps the weights after each of its updates, and the error feedback of each worker."""

    def __init__(self, replay: Replay, step: Step, worker: tf.Variable, clip: Clip):
        """`worker` is assigned the rank of the worker whose gradient is computed; `clip` is for the sums over workers."""
        self._replay, self._step, self._worker, self._clip = replay, step, worker, clip
        self._initial_state = [variable.numpy() for variable in step.reducer_state]
        self._state_by_worker: dict[int, list[np.ndarray]] = {}
        variables = (*step.variables, *keras_internals.moving_statistics(step.source.model))[: len(replay.placement)]
        self._variables = [*map(keras_internals.value_of, variables)]
        self._tables = [layer.table for layer in keyed_layers(step.source.model)]
        run = replay.strategy.run
        self._compute = tf.function(lambda *args: run(step.compute, *args), autograph=False)
        self._apply = tf.function(  # the number of embedding rows varies
            lambda *args: run(self._apply_sum, *args), autograph=False, reduce_retracing=True
        )

    def __call__(
        self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> LoopResult:
        """Replays the updates of these steps."""
        first, count = int(first_step), int(steps)
        strategy, parts = self._replay.strategy, range(self._replay.batch_parts)
        batches = [[split_example_indices(next(iterator), strategy)[0] for _ in parts] for _ in range(count)]
        snapshots = {first: self._snapshot()}
        losses, is_counted = np.full([count], np.nan), np.zeros([count], bool)
        for update in self._replay.updates[first : first + count]:
            if update.factor:  # otherwise the update was dropped, or not finite
                step = update.ticket - first
                losses[step] = self._repeat(update, batches[step], snapshots, with_gradient_norm)
                is_counted[step] = True
            snapshots[update.version + 1] = self._snapshot()
        return LoopResult(
            losses=tf.constant(losses, keras.config.floatx()),
            is_finite=tf.constant(is_counted),
            norm=tf.zeros([], keras.config.floatx()),
            may_continue=tf.constant(True),
            gradient_finite=(),
            wait_seconds=tf.zeros([], tf.float64),
            compute_seconds=tf.zeros([1], tf.float64),
            example_indices=tf.zeros([0], tf.int64),
            sizes=tf.zeros([count], tf.int32),
        )

    def _repeat(
        self, update: Update, parts: Sequence[Any], snapshots: Mapping[int, _Snapshot], with_gradient_norm: tf.Tensor
    ) -> float:
        """Repeats an update, given the parts of its batch and the snapshots of all versions; returns the loss."""
        servers, weight_count = len(update.versions) // len(update.workers), len(self._step.variables)
        results, all_states = [], []
        for index, worker in enumerate(update.workers):
            read = self._read([snapshots[version] for version in update.versions[index * servers :][:servers]])
            self._assign(read)
            self._set_worker(worker, update.loss_scale)
            part = parts[worker if self._replay.batch_parts > 1 else 0]
            results.append(self._compute(part, tf.constant(update.ticket, tf.int64), with_gradient_norm))
            self._state_by_worker[worker] = [value.numpy() for value in results[-1].state]
            all_states.append([variable.numpy() for variable in self._variables[weight_count:]])
        states = [_mean(values) for values in zip(*all_states, strict=True)]
        values, tables = snapshots[update.version]
        new_states = self._new_states(update, read.values[weight_count:], states, values[weight_count:])
        self._assign(_Snapshot([*values[:weight_count], *new_states], tables))
        scale = self._scale(parts, update.workers)
        self._apply(results, tf.constant(scale, tf.float64), tf.constant(update.factor, tf.float64))
        return scale * sum(float(result.loss) for result in results)

    def _scale(self, parts: Sequence[Any], workers: Sequence[int]) -> float:
        """Returns the factor that makes the sum of the workers' gradients the mean over their examples."""
        sizes = [int(count_rows(part)) for part in parts]
        return sum(sizes) / sum(sizes[worker] for worker in workers) if self._replay.batch_parts > 1 else 1.0

    def _apply_sum(self, results: Sequence[Any], scale: tf.Tensor, factor: tf.Tensor) -> None:
        sums = [functools.reduce(operator.add, values) for values in zip(*(r.gradients for r in results), strict=True)]
        gradients = [_scaled(total, scale) for total in sums]
        gradients = [_scaled(gradient, factor) for gradient in self._clip(gradients, global_norm(gradients))]
        self._step.apply(results[0]._replace(gradients=gradients), self._step.unused_variables())

    def _set_worker(self, worker: int, loss_scale: float) -> None:
        """Assigns the rank, the error feedback and the loss scale of a worker."""
        self._worker.assign(worker)
        for scale in self._step.source.scale[:1]:
            scale.assign(loss_scale)
        state = self._state_by_worker.get(worker, self._initial_state)
        for variable, value in zip(self._step.reducer_state, state, strict=True):
            variable.assign(value)

    def _snapshot(self) -> _Snapshot:
        return _Snapshot([variable.numpy() for variable in self._variables], [table.export() for table in self._tables])

    def _assign(self, snapshot: _Snapshot) -> None:
        for variable, value in zip(self._variables, snapshot.values, strict=True):
            variable.assign(value)
        for table, arrays in zip(self._tables, snapshot.tables, strict=True):
            table.restore(arrays)

    def _read(self, snapshots: Sequence[_Snapshot]) -> _Snapshot:
        """Returns what a worker has read, given the snapshot of each server."""
        values = []
        for variable, server in enumerate(self._replay.placement):
            value = snapshots[server].values[variable]
            if server == BY_ROWS:
                value = np.empty_like(value)
                for first, snapshot in enumerate(snapshots):
                    value[first :: len(snapshots)] = snapshot.values[variable][first :: len(snapshots)]
            values.append(value)
        tables = zip(*(snapshot.tables for snapshot in snapshots), strict=True)
        return _Snapshot(values, [_combined(server_tables) for server_tables in tables])

    def _new_states(
        self,
        update: Update,
        read_states: Sequence[np.ndarray],
        assigned_states: Sequence[np.ndarray],
        current_states: Sequence[np.ndarray],
    ) -> Iterator[np.ndarray]:
        """Yields the values of states after an update; see `VariableServer`."""
        servers = self._replay.placement[len(self._step.variables) :]
        for server, read, assigned, current in zip(servers, read_states, assigned_states, current_states, strict=True):
            is_current = update.versions[server] == update.version
            yield assigned if is_current else current + (assigned - read)


def _combined(tables: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns an embedding table as a worker has read it, given its `export` at the version of each server."""
    arrays = {"updates": tables[0]["updates"]}
    for name in tables[0].keys() - {"updates"}:
        keys = "candidates" if name == "candidates" else "keys"
        parts = [table[name][split(table[keys][:, 0], len(tables), True)[i][0]] for i, table in enumerate(tables)]
        arrays[name] = np.concatenate(parts)
    return arrays


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    return values[0] if len(values) == 1 else sum(values[1:], values[0]) / len(values)


def _scaled(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


MAX_ROUNDINGS = 4.0  # two correct runs in 16 bits differ by about one rounding; bugs cause ten or more
_MIN_NORM = 1e-30
REFERENCE_SECONDS = 24 * 3600.0  # how long the other processes wait for the reference

# By precision and kind of optimizer. Adaptive optimizers divide by the size of a gradient, so they turn the rounding error
# of a small gradient into a full step.
TOLERANCES = {
    ("float64", "linear"): 1e-9,
    ("float64", "adaptive"): 1e-8,
    ("float32", "linear"): 1e-5,
    ("float32", "adaptive"): 1e-3,
}
LINEAR = ("SGD", "MomentumCorrectedSGD")
_STEPS_PER_REPLAY = 10  # gradients are never stale in calls of one step
NOISE = {"float64": 1e-12, "float32": 1e-5}  # a gradient this small, relative to the model's largest, is rounding error


_STEP_FIELDS = ("step", "loss", "reference_loss", "largest_difference", "absolute_difference", "variable")


def tolerance(config: VerifyConfig, optimizer: keras.Optimizer) -> float:
    """Returns the largest difference that passes: the flag, or a default for the precision and optimizer."""
    if uses_roundings(config):
        return MAX_ROUNDINGS
    kind = "linear" if type(optimizer).__name__ in LINEAR else "adaptive"
    return config.tolerance or TOLERANCES[(keras.config.floatx(), kind)]


def uses_roundings(config: VerifyConfig) -> bool:
    """Returns whether differences are measured in roundings of 16-bit numbers."""
    return config.precision == "mixed_bfloat16" and not config.tolerance


def verify(session: Session, print_line: Callable[[str], None]) -> dict[str, Any] | None:
    """Trains with the strategy on all processes and the reference on the chief; reports the differences of each step.

    The config of the session is a `VerifyConfig`. Returns the result, as in docs/reference/json.md, on the chief, else None.
    """
    strategy, config = session.strategy, session.config
    strategy_trainer = make_trainer(session, strategy)
    if strategy.is_chief and strategy.total_devices == 1:
        warn_once(
            f"Strategy {strategy.name} has one device here, so one device is compared with itself, which shows "
            "nothing about several devices. Add --devices=2, or start several processes with `tfdist launch`.",
            situation=ONE_DEVICE,
        )
    warn_about_flags(config, strategy, strategy_trainer.model)
    trace: list[dict[str, np.ndarray]] = []

    def print_values(explanation: Explanation) -> None:
        for line in (explanation.summary, *map(": ".join, explanation.rows(all_values=False))):
            print_line(line)

    with using_listener(print_values) if strategy.batch_parts > 1 else nullcontext():
        strategy_trainer.build(session.data.train)
    remote = strategy.remote
    if remote and {*remote.tables.numbers} - remote.tables.keyed and remote.sparse_updates == LAZY:
        raise InputError(
            "A verification compares with Keras on one device, which updates all rows of an embedding. Received: "
            "--sparse_updates=lazy. Use --sparse_updates=exact."
        )
    is_replayed = bool(remote) and (
        (remote.staleness.kind != SYNC and remote.staleness.bound != 0)
        or (remote.whole_batches and config.compression != EXACT)
    )
    if is_replayed:
        remote.records_updates = True
    steps_per_call = _STEPS_PER_REPLAY if is_replayed else 1
    calls = _run(
        session, strategy_trainer, lambda: trace.append(_values(strategy, strategy_trainer.model)), steps_per_call
    )
    replicas_equal = _replicas_equal(strategy, strategy_trainer.model)
    if not strategy.is_chief:
        return None
    single = create(REFERENCE, Cluster(), lambda _: LocalGroup())
    reference_config = dataclasses.replace(config, compression="none", balance="equal")
    reference_session = dataclasses.replace(session, config=reference_config)
    rounding = _Rounding(reference_session, single) if uses_roundings(reference_config) else None
    reference = make_trainer(reference_session, single)
    reference.build(session.data.train)
    if is_replayed:
        synchronizer: Any = strategy_trainer.program.synchronizer
        updates = synchronizer.updates
        parts = strategy.training_shares[1]
        if parts > 1 and remote.tables.keyed:
            raise InputError(
                "A verification with a DynamicEmbedding repeats updates of whole batches. Received: "
                f"--staleness={remote.staleness}, which divides batches. Use sync, bounded(s) or async."
            )
        replay = Replay(reference.model, single, updates, remote.servers.placement, synchronizer.methods, parts)
        reference.program.synchronizer = replay
    zero_gradient_paths = _zero_gradient_paths(session, reference)
    differing_layers = _different_by_design(session, reference.model)
    limit = tolerance(config, reference.model.optimizer)
    if is_replayed:
        max_staleness = max((update.version - min(update.versions) for update in updates if update.factor), default=0)
        print_line(
            f"One device makes the same updates from the same weights, which were up to {max_staleness} updates old."
            + (f" Dropped {synchronizer.totals['dropped_rows']} examples." if remote.staleness.drops_shares else "")
        )
    _print_header(session, reference.model, differing_layers, limit, print_line)
    lines: list[tuple[float, float, str]] = []

    def compare() -> None:
        values, reference_values = trace.pop(0), _values(single, reference.model)
        sizes = (
            rounding.next_step_roundings(reference_values)
            if rounding
            else {path: _norm(value) or 1.0 for path, value in reference_values.items()}
        )
        deltas = {
            path: values[path] - value if values[path].shape == value.shape else np.array(math.inf)  # other keys
            for path, value in reference_values.items()
        }
        norms = {path: rounding.norm(path, value) if rounding else _norm(value) for path, value in deltas.items()}
        path = max([p for p in deltas if p not in zero_gradient_paths] or deltas, key=lambda p: norms[p] / sizes[p])
        lines.append((norms[path] / sizes[path], float(np.max(np.abs(deltas[path]), initial=0.0)), path))

    reference_calls = _run(session, reference, compare, steps_per_call)
    rows = [(a.step, a.loss, b.loss, *line) for a, b, line in zip(calls, reference_calls, lines, strict=True)]
    largest = max(difference for _, _, _, difference, *_ in rows)
    result = {
        "strategy": session.strategy_choice.strategy,
        "reason": session.strategy_choice.reason,
        "processes": strategy.cluster.size,
        "replicas": strategy.batch_parts,
        "equal": replicas_equal and largest <= limit,
        "replicas_equal": replicas_equal,
        "largest_difference": largest,
        "tolerance": limit,
        "difference_unit": "roundings" if rounding else "relative",
        "steps": [dict(zip(_STEP_FIELDS, row, strict=True)) for row in rows],
        "variables_not_compared": sorted(zero_gradient_paths),
        "layers_different_by_design": differing_layers,
    }
    _print_result(result, print_line)
    return result


def _print_result(result: Mapping[str, Any], print_line: Callable[[str], None]) -> None:
    for step in result["steps"]:
        number, a, b, difference, absolute, path = step.values()
        mark = "" if difference <= result["tolerance"] else "  <- exceeds the tolerance"
        print_line(f"{number:5d}  {a:<14.8g} {b:<14.8g} {difference:9.2e} {absolute:9.2e}  {path}{mark}")
    for path in result["variables_not_compared"]:
        print_line(f"Not compared: {path}, whose true gradient is zero: its differences are rounding errors.")
    equal = result["replicas_equal"]
    print_line(
        "Replicas are equal bit for bit." if equal else "REPLICAS DIFFER: their weights are not equal bit for bit."
    )
    print_line(
        f"{'Equal' if result['equal'] else 'NOT EQUAL'}: the largest difference is {result['largest_difference']:.2e} "
        f"{result['difference_unit']}; the tolerance {result['tolerance']:.0e}."
    )


class _Rounding:
    """The effect of 16-bit computation on training on one device, step by step."""

    def __init__(self, session: Session, single: Strategy):
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float32")
        exact_session = dataclasses.replace(session, config=dataclasses.replace(session.config, precision="float32"))
        trainer = make_trainer(exact_session, single)
        trainer.build(session.data.train)
        self._first = _values(single, trainer.model)
        self._steps: list[dict[str, np.ndarray]] = []
        self._changed_mask: dict[str, np.ndarray] = {}
        _run(exact_session, trainer, lambda: self._steps.append(_values(single, trainer.model)))
        keras.config.set_dtype_policy(policy)

    def next_step_roundings(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns for each variable the difference between 16 and 32 bits after the next step.

        The difference relative to the change since the first step is at least its median over all variables.
        """
        exact_values = self._steps.pop(0)
        self._changed_mask = {path: exact_values[path] != self._first[path] for path in exact_values}
        roundings = {path: self.norm(path, values[path] - exact_values[path]) for path in exact_values}
        changes = {path: self.norm(path, exact_values[path] - self._first[path]) for path in exact_values}
        typical_ratio = float(
            np.median([roundings[path] / change for path, change in changes.items() if change] or [0.0])
        )
        return {path: max(roundings[path], typical_ratio * changes[path], _MIN_NORM) for path in exact_values}

    def norm(self, path: str, difference: np.ndarray) -> float:
        """Returns the norm of a variable's difference at this step, without the largest 5% of its changed elements.

        Adam turns a gradient whose sign is rounding error into a full step.
        """
        mask = self._changed_mask[path]
        sizes, unchanged_sizes = np.abs(difference[mask]), np.abs(difference[~mask])
        kept_count = len(sizes) - (math.ceil(len(sizes) / 20) if len(sizes) >= 5 else 0)
        if not np.isfinite(difference).all():
            return math.inf
        return math.hypot(_norm(np.sort(sizes)[:kept_count]), _norm(unchanged_sizes))


class Call(NamedTuple):
    """A call of the compiled loop: the step after it, its number of steps, and their mean loss."""

    step: int
    steps: int
    loss: float


def _run(session: Session, trainer: Trainer, observe: Callable[[], None], steps_per_call: int = 1) -> list[Call]:
    config = session.config
    calls: list[Call] = []
    epoch: list[Call] = []

    def on_epoch_begin(*_: Any) -> None:
        epoch.clear()

    def on_call_end(_: int, logs: dict[str, float]) -> None:
        steps = trainer.step - (calls[-1].step if calls else 0)
        # Keras's logs contain the mean since the start of the epoch.
        total = logs["loss"] * (sum(call.steps for call in epoch) + steps) - sum(
            call.loss * call.steps for call in epoch
        )
        calls.append(Call(trainer.step, steps, total / steps))
        epoch.append(calls[-1])
        observe()

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin, on_train_batch_end=on_call_end)
    trainer.fit(
        session.data.train,
        batch_size=config.batch_size,
        steps=config.steps or None,
        epochs=config.epochs or None,
        schedule=Schedule(steps_per_call=steps_per_call),
        callbacks=[callback],
        verbose=0,
    )
    return calls


def _values(strategy: Strategy, model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the weights of the whole model on the chief, or of this process's part on other ranks."""
    with strategy.parts.full_model(model) as full_model:
        tables = [(layer.embeddings.path, layer.table.export()) for layer in keyed_layers(model) if strategy.is_chief]
        rows = {f"{path}/{name}": np.asarray(array, float) for path, table in tables for name, array in table.items()}
        return rows | {
            v.path: np.asarray(tf.convert_to_tensor(strategy.local(v.value)[0]), np.float64)
            for v in full_model.variables
            if tf.as_dtype(v.dtype).is_floating and (strategy.is_chief or keras_internals.value_of(v) is not None)
        }


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value))


def _replicas_equal(strategy: Strategy, model: keras.Model) -> bool:
    trainable = [strategy.local(v.value) for v in model.trainable_variables]
    digests = [digest([values[i] for values in trainable]) for i in range(len(strategy.local_replicas))]
    digests_by_rank = strategy.peers.gather("verify/digests", digests, deadline=REFERENCE_SECONDS)
    are_equal = len({value for digests in digests_by_rank if digests for value in digests}) == 1  # without lost workers
    return False not in strategy.group.gather("verify/equal", are_equal, deadline=REFERENCE_SECONDS)


def _zero_gradient_paths(session: Session, reference: Trainer) -> set[str]:
    """Returns the paths of variables whose true gradient is zero, by the model's table or by measurement."""
    model = reference.model
    patterns = models.zero_gradient_patterns(session.config.model)
    pipeline = Pipeline(session.data.train, session.config.batch_size, session.config.seed)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(next(iter(pipeline.dataset([0], 1))))
    state = [(variable, tf.identity(variable.value)) for variable in model.non_trainable_variables]
    limit = TOLERANCES[keras.config.floatx(), "adaptive"]
    with tf.GradientTape() as tape, check_declarations(int(count_rows(x)), limit):
        loss = model.compute_loss(x, y, model(x, training=True), sample_weight=weight, training=True)
    for variable, value in state:  # restores moving averages and random states
        variable.assign(value)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    sizes = {
        v.path: float(tf.reduce_max(tf.abs(tf.convert_to_tensor(g))))
        for v, g in zip(model.trainable_variables, gradients, strict=True)
        if g is not None
    }
    threshold = NOISE[keras.config.floatx()] * max(sizes.values(), default=0.0)
    zero_gradient_paths = {path for path in sizes if any(re.search(pattern, path) for pattern in patterns)}
    if keyed_layers(model):  # no key has a row yet, so that weights after them have no gradient
        return zero_gradient_paths
    return zero_gradient_paths | {path for path, size in sizes.items() if size <= threshold}


def _print_header(
    session: Session, model: keras.Model, differing_layers: list[str], limit: float, print_line: Callable[[str], None]
) -> None:
    print_line(f"{session.strategy_choice.reason}")
    for path in differing_layers:
        print_line(
            f"Differs by design: {path} uses random numbers or statistics of each replica, so results are not equal."
        )
    if uses_roundings(session.config):
        print_line(
            "Differences are in roundings: multiples of the distance between bfloat16 and float32 on one device. "
            f"Tolerance {limit:.0e}."
        )
    else:
        print_line(f"Tolerance {limit:.0e} for {keras.config.floatx()} and {type(model.optimizer).__name__}.")
    unit = "roundings" if uses_roundings(session.config) else "relative"
    print_line(f"{'step':>5}  {'loss':<14} {'of one device':<14} {unit:>9} {'absolute':>9}  largest difference in")


def _different_by_design(session: Session, model: keras.Model) -> list[str]:
    strategy = session.strategy
    is_partitioned = strategy.replicas > 1 or session.config.accumulate_steps > 1 or strategy.micro_batches > 0

    def differs(layer: keras.Layer) -> bool:
        """Returns whether statistics or random numbers of a layer depend on the division of the batch into parts."""
        takes_statistics = type(layer) is keras.layers.BatchNormalization and layer.trainable and strategy.replicas > 1
        draws = bool(getattr(layer, "_seed_generators", ())) or hasattr(layer, "seed_generator")
        is_random = draws and bool(getattr(layer, "rate", getattr(layer, "stddev", 0)))
        return takes_statistics or (is_partitioned and is_random)

    return [keras_internals.path_of(layer) for layer in keras_internals.layers_of(model) if differs(layer)]
