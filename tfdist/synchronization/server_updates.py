"""The training loop of a parameter-server worker: pulls weights, computes gradients and pushes them."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica
from tfdist.config.staleness import REJECT, REPLAY, SSP, SYNC
from tfdist.data.batches import count_rows
from tfdist.data.row_partition import IndexedBatch, ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Clip
from tfdist.gradients.compression import EXACT, choose_methods
from tfdist.parameter_server.coordinator import Outcome, RangeResult
from tfdist.parameter_server.pushed_gradients import PushReducer
from tfdist.parameter_server.remote_variables import RemoteVariables
from tfdist.parameter_server.update_order import Update, check_recorded
from tfdist.reporting import RunDirectory
from tfdist.step.compiled_loop import Loop, LoopResult, MakeLoop, compile_loop, split_example_indices
from tfdist.step.compiled_steps import Steps
from tfdist.step.gradient_source import GradientSource
from tfdist.step.metrics import ModelMetrics
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.step.validation import inner_optimizer
from tfdist.storage import path_of
from tfdist.synchronization import WeightSynchronizer

_log = logging.getLogger(__name__)

_WAITS = ("data", "workers", "pull", "push")
_DROPPED_ROWS, _REJECTIONS = "dropped_rows", "rejected_gradients"  # fields of records


class Statistics:
    """Counts the updates, the times and the bytes of all workers between two records.

    The work of a worker is a mapping of numbers by name: `examples`, the seconds of `compute` and of the waits for `data`, for
    other `workers` and for answers to `pull` and `push`, and the bytes `pull/0` and `push/0` of messages to and from server 0.
    Workers send it when they commit a ticket. Work after the last ticket of a range counts for the next range. The coordinator
    measures the waits for other workers: for a step that the order of updates permits, and at the beginning and end of a range,
    when the workers wait for each other.
    """

    def __init__(self, workers: int, update_seconds: Sequence[float], *, counts_staleness: bool = True):
        """Starts counting; `update_seconds` has the seconds that each server has spent on updates so far."""
        self._workers, self._counts_staleness = workers, counts_staleness
        self._reset(update_seconds)

    def _reset(self, update_seconds: Sequence[float]) -> None:
        self._first_update_seconds = self._update_seconds = update_seconds
        self._seconds = 0.0
        self._updates: list[Update] = []
        self._work: dict[tuple[int, str], float] = collections.defaultdict(float)  # by worker and name

    def add(self, result: RangeResult, seconds: float, update_seconds: Sequence[float]) -> None:
        """Adds the result of a range of tickets on worker 0; `seconds` is its wall time. See the constructor."""
        self._seconds += seconds
        self._update_seconds = update_seconds
        self._updates += [update for update in result.updates if update.factor]
        for worker, work in enumerate(result.work):
            for name, value in work.items():
                self._work[worker, name] += value

    def take_fields(self) -> dict[str, Any]:
        """Returns the fields of a training record, {} if there are none, and restarts counting."""
        fields: dict[str, Any] = {}
        updates, servers = self._updates if self._counts_staleness else (), len(self._update_seconds)
        if ages := [[update.version - v for v in update.versions] for update in updates if update.versions]:
            staleness = [max(of_update) for of_update in ages]
            counts = [
                collections.Counter(a for each in ages for a in each[server::servers]) for server in range(servers)
            ]
            histograms = [{str(age): count[age] for age in sorted(count)} for count in counts]
            mean = sum(staleness) / len(staleness)
            fields = {"staleness": mean, "max_staleness": max(staleness), "staleness_histogram": histograms}
        if self._seconds:
            fields["workers"] = [self._worker_fields(worker) for worker in range(self._workers)]
            fields["servers"] = [self._server_fields(server) for server in range(servers)]
        self._reset(self._update_seconds)
        return fields

    def _worker_fields(self, worker: int) -> dict[str, Any]:
        updates = sum(worker in update.workers for update in self._updates)
        return {
            "updates": updates,
            "updates_per_second": updates / self._seconds,
            "examples_per_second": self._work[worker, "examples"] / self._seconds,
            "compute_seconds": self._work[worker, "compute"],
            "wait_seconds": {cause: self._work[worker, cause] for cause in _WAITS},
        }

    def _server_fields(self, server: int) -> dict[str, float]:
        workers = range(self._workers)
        pulled, pushed = (int(sum(self._work[w, f"{method}/{server}"] for w in workers)) for method in ("pull", "push"))
        seconds = self._update_seconds[server] - self._first_update_seconds[server]
        return {"pulled_bytes": pulled, "pushed_bytes": pushed, "update_seconds": seconds}


class ServerSynchronizer(WeightSynchronizer):
    """Trains with parameter servers: each step of a call is a ticket, and workers compute tickets concurrently.

    Attributes:
      updates: all updates so far, if they are recorded; otherwise empty.
      replayed_updates: on the chief in a replay, the updates to repeat, by version.
      totals: numbers of `dropped_rows`, which no update has used, and of `rejected_gradients` in the whole run.
      methods: compression method of each gradient, and of the loss; empty before the first call of `loop`.
      pushed_bytes: bytes of gradients that this worker has pushed per step, on average in the last call.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, remote: RemoteVariables, clip: Clip):
        """Creates the variables on the servers; every process must call it."""
        self._model, self.strategy, self.remote = model, strategy, remote
        self._model_number = remote.servers.models
        self._statistics = Statistics(
            strategy.cluster.size,
            remote.servers.update_seconds,
            counts_staleness=remote.whole_batches or remote.staleness.kind == SSP,
        )
        self.totals: collections.Counter[str] = collections.Counter()
        self._recorded_totals: collections.Counter[str] = collections.Counter()
        self.updates: list[Update] = []
        is_replay = strategy.is_chief and remote.staleness.kind == REPLAY
        recorded = recorded_updates(recorded_run(remote.staleness.path)) if is_replay else ()
        self.replayed_updates = {update.version: update for update in recorded}
        self.remedy_for_slow_rank = (
            "" if remote.whole_batches else "--staleness=bounded(4) or async does not wait for it in each step."
        )
        self.methods: list[str] = []
        self.pushed_bytes = 0.0
        self.clip = clip
        refusal = remote.define(inner_optimizer(model.optimizer), clip) if strategy.is_chief else ""
        if refusal := strategy.group.broadcast("servers/variables", refusal):
            raise InputError(
                "Servers make the updates: optimizers, schedules and constraints must be classes of Keras or tfdist. "
                f"Received: {refusal}. Use one of these, or change the learning rate in a callback."
            )

    def loop(
        self, steps: Steps, batch_size: int | None, rate_factor: float, step: int, make: MakeLoop = compile_loop
    ) -> Loop:
        self.remote.servers.check_holds(self._model_number)
        compression, tables = steps.compression, self.remote.tables.numbers  # whose rows are not compressed
        methods = choose_methods(steps.specs, compression.rules, {}, compression.min_bytes)
        self.methods = [EXACT if i in tables or m.startswith(EXACT) else m for i, m in enumerate(methods)]

        def create(settings: Settings, store: StateStore, metrics: ModelMetrics) -> tuple[Step, Loop]:
            check_supported(self._model, self.remote, settings, metrics, rate_factor)
            settings = dataclasses.replace(settings, batch_size=batch_size, clip=Clip())  # servers clip
            collectives = OneReplica() if self.remote.whole_batches else None
            source = GradientSource(self._model, self.strategy, store, settings, metrics, collectives)
            agrees = not self.remote.whole_batches and settings.loss_scale is not None
            reducer = PushReducer(self.methods, self.strategy.cluster.rank, agrees=agrees)
            worker_step = Step(source, reducer, store)
            return worker_step, TicketLoop(self, worker_step, reducer)

        return steps.custom_loop(("tickets", batch_size), create)

    @property
    def payload_per_step(self) -> float:
        return self.pushed_bytes

    def take_fields(self) -> Mapping[str, Any]:
        fields, staleness = self._statistics.take_fields(), self.remote.staleness
        names = {_DROPPED_ROWS: staleness.drops_shares, _REJECTIONS: staleness.late.kind == REJECT}
        for name in (name for name, is_possible in names.items() if is_possible or self.totals[name]):
            fields |= {name: self.totals[name] - self._recorded_totals[name], f"total_{name}": self.totals[name]}
        self._recorded_totals = self.totals.copy()
        return fields

    def to_json(self) -> dict[str, Any]:
        return dict(self.totals)

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        self.totals, self._recorded_totals = collections.Counter(saved), collections.Counter(saved)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """See base class. At its end, the chief logs how often rows of tables were used."""
        yield
        for text in self.remote.describe_row_use() if self.strategy.is_chief else ():
            _log.info("%s", text)

    def store_result(self, result: RangeResult, seconds: float) -> None:
        """Stores the statistics and the updates of a range of tickets, which has taken `seconds`."""
        self._statistics.add(result, seconds, self.remote.servers.update_seconds)
        self.totals += collections.Counter({_DROPPED_ROWS: result.dropped_rows, _REJECTIONS: result.rejections})
        if self.remote.records_updates:
            self.updates += result.updates


def recorded_run(path: str) -> RunDirectory:
    """Returns an earlier run, given its output directory or the directory of its ledger."""
    directory = RunDirectory(path_of(path))
    is_ledger = not directory.is_run and directory.path.name == directory.ledger(0, 0).parent.name
    return RunDirectory(directory.path.parent) if is_ledger else directory


def recorded_updates(directory: RunDirectory) -> list[Update]:
    """Returns the updates of an earlier run, in order.

    Raises:
      InputError: the run has recorded no updates.
    """
    lines = directory.read_updates()
    updates = [Update._make(tuple(v) if isinstance(v, list) else v for v in line.values()) for line in lines]
    if not updates:
        raise InputError(
            "A replay needs the output directory of a run of parameter servers whose workers compute whole batches. Received: "
            f"{directory.path}, which has no record of updates. Use a run with --staleness=async or bounded(4)."
        )
    return updates


def check_supported(
    model: keras.Model, remote: RemoteVariables, settings: Settings, metrics: ModelMetrics, rate_factor: float
) -> None:
    """Raises `InputError` for options and models that parameter servers do not support."""
    staleness, has_one_pass = remote.staleness, settings.micro_steps == 1 and not settings.jit_compile
    needs_global_norm = bool(getattr(inner_optimizer(model.optimizer), "global_clipnorm", None))
    rules = (
        (rate_factor != 1, "the same batch size in the whole run", "an elastic batch", "another --strategy"),
        (
            remote.tables.numbers
            and not (has_one_pass and staleness.pull_every == 1 and not metrics.replicas_see_all_rows),
            "a single pass over independent rows, pulled for each step and without XLA, for an embedding that is split by rows",
            "jit_compile, accumulate_steps, pull_every, or outputs that depend on other rows",
            "no DynamicEmbedding" if remote.tables.keyed else "a larger --min_table_bytes",
        ),
        (
            needs_global_norm and remote.servers.count > 1,
            "an optimizer that updates each variable independently, if there are several servers",
            "global_clipnorm",
            "--clip_norm, or the argument `clip` of Trainer",
        ),
        (
            settings.loss_scale and not remote.whole_batches and staleness.kind != SYNC,
            "training without loss scaling, if workers compute parts of different steps",
            f"--staleness={staleness} and a loss scale",
            "--precision=mixed_bfloat16, or --staleness=sync",
        ),
        (
            staleness.kind != SYNC and metrics.replicas_see_all_rows,
            "outputs and metrics that are independent for each row, if workers do not compute each step together",
            f"--staleness={staleness} and a model whose rows depend on each other",
            "--staleness=sync",
        ),
    )
    for is_violated, rule, received, remedy in rules:
        if is_violated:
            raise InputError(f"Parameter servers need {rule}. Received: {received}. Use {remedy}.")


class TicketLoop:
    """The loop of one worker; see `Loop`."""

    def __init__(self, synchronizer: ServerSynchronizer, step: Step, reducer: PushReducer):
        self._synchronizer, self._step, self._reducer = synchronizer, step, reducer
        self._strategy, self._remote = strategy, remote = synchronizer.strategy, synchronizer.remote
        self._servers = remote.servers
        self._rank = strategy.cluster.rank
        self._compute: Any = tf.function(self._compute_in_context, autograph=False, reduce_retracing=True)
        self._skip = tf.function(lambda result: strategy.run(step.skip, result), autograph=False)
        self._store_state = tf.function(lambda result: strategy.run(step.store_state, result), autograph=False)
        if remote.whole_batches:  # otherwise, workers save these like states of layers
            remote.worker_states = step.reducer_state
        self._is_traced = False
        self._work: dict[str, float] = collections.defaultdict(float)  # of this worker in the call
        self._last_pull: tuple[list[int], list[np.ndarray]] = [], []  # versions and states
        # Worker 0 holds the metrics of all workers, including lost ones, unless workers compute parts of the same step.
        self._metrics = [*map(keras_internals.value_of, step.source.metrics.variables)] if remote.whole_batches else []

    def __call__(
        self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> LoopResult:
        """Computes tickets until the range is complete, and returns the results of all workers."""
        start_time = time.perf_counter()
        first, end = int(first_step), int(first_step) + int(steps)
        self._work.clear()
        previous_metrics = [variable.numpy() for variable in self._metrics]
        for variable in self._metrics:  # workers commit the values of this call only
            variable.assign(tf.zeros_like(variable))
        batches = self._iterate_batches(iterator)
        if not self._is_traced:
            batches = self._trace(batches, getattr(iterator, "element_spec", None), with_gradient_norm)
        updates = self._updates_to_replay(first, end)
        if self._strategy.is_chief:
            self._remote.tolerate_lost_workers()
            self._servers.coordinate("clear_updates")
            self._remote.write_changes(version=first)
        settings, scale = self._step.settings, [variable.numpy().item() for variable in self._step.source.scale]
        options = {"updates": updates, "scale": scale, "max_skipped_steps": settings.max_skipped_steps}
        rule = dataclasses.asdict(settings.loss_scale) if settings.loss_scale else None
        self._servers.coordinate("open", worker=self._rank, first=first, end=end, loss_scale=rule, **options)
        inputs = TicketInputs(batches, first, self._remote.tables.ids)
        # If workers compute whole batches alternately, each of the others takes a ticket in between.
        distance = len(self._servers.workers) if self._remote.whole_batches else 1
        answer = self._servers.coordinate("take", worker=self._rank)
        while answer:
            ticket, version, active_tickets, scale = answer
            inputs.drop_before(ticket, active_tickets)
            prepare_next = functools.partial(inputs.get, min(ticket + distance, end - 1))
            needs_norm = bool(with_gradient_norm) and ticket == end - 1
            answer = self._compute_ticket(ticket, version, scale, inputs.get(ticket), needs_norm, prepare_next)
        inputs.skip_to(end)
        result = self._servers.result()
        for i, variable in enumerate(self._metrics):
            variable.assign(previous_metrics[i] + (result.metrics[i] if result.metrics else 0))
        applied_tickets = {update.ticket for update in result.updates if update.factor}
        if self._step.source.scale:
            self._assign_scale(result.scale)
        norm = self._remote.pull_all(first + len(result.updates))
        self._synchronizer.store_result(result, time.perf_counter() - start_time)
        tickets = self._work["tickets"]
        if tickets:
            self._synchronizer.pushed_bytes = self._work["gradient_bytes"] / tickets
        return LoopResult(
            losses=tf.constant(result.losses, keras.config.floatx()),
            is_finite=tf.constant([ticket in applied_tickets for ticket, _ in enumerate(result.losses, first)]),
            norm=tf.constant(result.norm if self._remote.whole_batches else norm, keras.config.floatx()),
            may_continue=tf.constant(result.is_finite),
            gradient_finite=(),
            wait_seconds=tf.constant(self._work["data"], tf.float64),
            # Scaled to all steps, because the worker may have computed only some of them.
            compute_seconds=tf.constant([self._work["compute"] * int(steps) / max(tickets, 1)], tf.float64),
            example_indices=tf.concat([tf.zeros([0], tf.int64), *result.example_indices], 0),
            sizes=tf.constant([*map(len, result.example_indices)] or [0] * len(result.losses), tf.int32),
            updates=[u._replace(reads=())._asdict() for u in result.updates] if self._remote.whole_batches else (),
        )

    def _updates_to_replay(self, first: int, end: int) -> list[Update]:
        """Returns the recorded updates of a range on the chief; [] without a replay. Every worker must call it."""
        if self._remote.staleness.kind != REPLAY:
            return []
        recorded = self._synchronizer.replayed_updates
        updates = [recorded[version] for version in range(first, end) if version in recorded]
        problem = ""
        if self._strategy.is_chief:
            has_tables, has_scale = bool(self._remote.tables.numbers), bool(self._step.settings.loss_scale)
            if len(updates) < end - first:
                problem = f"only {len(recorded)} updates"
            elif any(bool(update.loss_scale) != has_scale for update in updates):
                problem = "another --precision, with or without a loss scale: use the same"
            else:
                workers = self._strategy.cluster.size
                problem = check_recorded(updates, first, workers, self._servers.count, has_tables)
        if problem := self._strategy.group.broadcast("replay", problem):
            raise InputError(
                f"A replay repeats whole calls of a run with the same options. Received: steps {first} to {end - 1} of "
                f"{self._remote.staleness.path}, which has {problem}."
            )
        return updates

    def _compute_ticket(
        self,
        ticket: int,
        version: int | Sequence[int] | None,
        scale: Sequence[float],
        inputs: "_Inputs",
        needs_norm: bool,
        prepare_next: Callable[[], object],
    ) -> Any:
        """Pulls the given version, computes a ticket and pushes its gradient; returns the answer of `Coordinator.take`.

        If the version is None, the weights and states are those of the last pull. `scale` is the state of the loss scale.
        Calls `prepare_next` while it waits for the answer.
        """
        batch, example_indices, ids = inputs
        assert ids is not None
        if version is None:
            self._remote.assign_states(self._last_pull[1])
        else:
            self._last_pull = self._remote.pull(version, ids)[:2]
        versions, previous_states = self._last_pull
        self._assign_scale(scale)
        is_whole = self._remote.whole_batches
        start_time = time.perf_counter()
        with self._remote.tables.check_known_ids():
            needs_own_norm = is_whole and (needs_norm or bool(self._synchronizer.clip.norm))
            result, payloads = self._compute(batch, tf.constant(ticket, tf.int64), tf.constant(needs_own_norm))
        loss, is_finite, norm = float(result.loss), bool(result.finite), float(result.norm)
        self._add_work(compute=time.perf_counter() - start_time, examples=len(example_indices), tickets=1)
        state, pushes = result._replace(gradients=[]), []
        if not is_finite:
            self._skip(state)
        else:
            new_states = [keras_internals.value_of(variable).numpy() for variable in self._remote.states]
            gradients = [np.asarray(payload) for payload in payloads[:-1]]  # without the loss
            size = sum(array.nbytes for array in gradients) + sum(4 * len(rows) for rows in ids)
            self._add_work(gradient_bytes=size)
            pushes = self._servers.push_messages(
                ticket,
                versions,
                gradients,
                list(zip(previous_states, new_states, strict=True)),
                methods=self._reducer.methods,
                ids=ids,
                norm=norm if is_whole else None,
                with_gradient_norm=needs_norm,
            )
        outcome, answer = self._servers.commit(
            ticket,
            [example_indices.numpy(), *(variable.numpy() for variable in self._metrics)],
            pushes,
            prepare_next,
            loss=loss,
            is_finite=is_finite,
            versions=versions,
            norm=norm,
            rows=self._rows(batch),
            loss_scale=scale[0] if scale else 0.0,
        )
        if is_finite and outcome != Outcome.APPLIED:
            self._skip(state)
        elif is_finite and self._step.reducer_state:
            self._store_state(state)
        if outcome in (Outcome.REJECTED, Outcome.UNUSED):
            self._servers.discard(ticket)
        return answer

    def _add_work(self, **work: float) -> None:
        """Adds to the work of this call, and to the work that the next commit sends."""
        for name, value in work.items():
            self._work[name] += value
            self._servers.work[name] += value

    def _rows(self, batch: Any) -> tuple[int, int]:
        """Returns the number of rows that this worker computes, and the number of rows of the whole batch."""
        if isinstance(batch, ReplicaRows):
            return int(batch.rows), int(batch.batch_size)
        rows = int(count_rows(batch))
        return rows, rows if self._remote.whole_batches else self._step.settings.batch_size or rows

    def _assign_scale(self, scale: Sequence[float]) -> None:
        """Assigns the state of the loss scale, which is empty without loss scaling."""
        for variable, value in zip(self._step.source.scale, scale, strict=False):
            variable.assign(value)

    def _compute_in_context(self, *args: Any) -> Any:
        with self._remote.tables.in_step():
            return self._strategy.run(lambda *args: (self._step.compute(*args), self._reducer.payloads), *args)

    def _iterate_batches(self, iterator: Iterator[Any]) -> Iterator[tuple[Any, tf.Tensor]]:
        """Yields batches and the indices of their examples, and measures the time spent waiting for data."""
        while True:
            start_time = time.perf_counter()
            element = next(iterator)
            self._add_work(data=time.perf_counter() - start_time)
            yield split_example_indices(element, self._strategy)

    def _trace(self, batches: Iterator[Any], spec: Any, with_gradient_norm: tf.Tensor) -> Iterator[Any]:
        """Traces the step on all workers at the same time, because they compare traces; returns the same batches.

        Uses the spec of the data if it is known: divisions by a static batch size are rounded differently.
        """
        batch, example_indices = next(batches)
        spec = batch if spec is None else spec.batch if isinstance(spec, IndexedBatch) else spec
        self._compute.get_concrete_function(spec, tf.constant(0, tf.int64), with_gradient_norm)
        staleness, calls = self._remote.staleness, self._step.calls
        if calls and not staleness.whole_batches and staleness.kind != SYNC:
            raise InputError(
                "Layers and losses must not communicate if workers compute different steps at the same time, as synchronized "
                f"batch normalization and masks do. Received: --staleness={staleness} and a call of {calls[0].operation} "
                f"({calls[0].name}). Use --staleness=sync, or --batch_norm=local."
            )
        unused_weights = self._step.unused_variables()
        if self._strategy.is_chief and unused_weights:
            self._servers.leave_out(sorted(unused_weights))
        self._is_traced = True
        return itertools.chain([(batch, example_indices)], batches)


class _Inputs(NamedTuple):
    """The inputs from which a worker computes a ticket: a batch, the indices of its examples, and the ids of table rows."""

    batch: Any
    example_indices: tf.Tensor
    ids: Sequence[np.ndarray] | None = None  # None until they are needed


class TicketInputs:
    """The inputs of tickets; each is read once, in order, and prepared once."""

    def __init__(
        self, batches: Iterator[tuple[Any, tf.Tensor]], first: int, find_ids: Callable[[Any], Sequence[np.ndarray]]
    ):
        """`batches` are batches with the indices of their examples; the first is for ticket `first`."""
        self._batches, self._next_ticket, self._find_ids = batches, first, find_ids
        self._known: dict[int, _Inputs] = {}  # by ticket

    def get(self, ticket: int) -> _Inputs:
        """Returns the inputs of a ticket."""
        while self._next_ticket <= ticket:
            self._known[self._next_ticket] = _Inputs(*next(self._batches))
            self._next_ticket += 1
        inputs = self._known[ticket]
        if inputs.ids is None:
            inputs = self._known[ticket] = inputs._replace(ids=self._find_ids(inputs.batch))
        return inputs

    def drop_before(self, ticket: int, active_tickets: Sequence[int]) -> None:
        """Drops the inputs of earlier tickets, except active ones, because the worker that computes one may be lost."""
        self._known = {n: inputs for n, inputs in self._known.items() if n >= ticket or n in active_tickets}

    def skip_to(self, ticket: int) -> None:
        """Reads and discards the batches of all remaining tickets before this one."""
        for _ in range(self._next_ticket, ticket):
            next(self._batches)
