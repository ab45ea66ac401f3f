"""The loop of a worker: it computes gradients with weights that it pulls from servers, and pushes them there."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica
from tfdist.data.row_partition import IndexedBatch
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Clip, Reducer, ReductionResult
from tfdist.parameter_server.coordinator import RangeResult
from tfdist.parameter_server.remote_variables import RemoteVariables
from tfdist.parameter_server.update_order import Update
from tfdist.step.compiled_loop import Loop, LoopResult, MakeLoop, compile_loop, split_numbers
from tfdist.step.compiled_steps import Steps
from tfdist.step.gradient_source import GradientSource
from tfdist.step.metrics import ModelMetrics
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.synchronization import WeightSynchronizer


class SummedByServers(Reducer):
    """Leaves the sum of gradients to the servers."""

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> ReductionResult:
        """See base class."""
        return ReductionResult(list(tensors), list(tensors), [], list(tensors))


class ServerSynchronizer(WeightSynchronizer):
    """Updates by parameter servers: the steps of a call are tickets, which the workers compute at the same time.

    Attributes:
      updates: all updates so far, if they are recorded.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, remote: RemoteVariables, clip: Clip):
        """Creates the variables on the servers; every process must call it.

        Args:
          model: compiled and built model.
          strategy: its strategy.
          remote: the variables of this worker.
          clip: how gradients are clipped.
        """
        self._model, self._strategy, self._remote = model, strategy, remote
        self._staleness: Sequence[int] = ()
        self.updates: list[Update] = []
        # Servers clip sums of shares; a worker, whole gradients.
        refused = remote.define(model.optimizer, Clip() if remote.whole_batches else clip) if strategy.is_chief else ""
        if refused := strategy.group.broadcast("servers/variables", refused):
            raise InputError(
                "Servers make the updates: optimizers, schedules and constraints must be classes of Keras or tfdist. "
                f"Received: {refused}. Use one of these, or change the learning rate in a callback."
            )

    def loop(self, steps: Steps, batch_size: int | None, rate: float, step: int, make: MakeLoop = compile_loop) -> Loop:
        """See base class."""
        self._remote.check_holds(self._model)

        def create(settings: Settings, store: StateStore, metrics: ModelMetrics) -> tuple[Step, Loop]:
            check_supported(self._model, self._remote, settings, metrics, rate)
            settings = dataclasses.replace(settings, batch_size=batch_size)
            if not self._remote.whole_batches:
                settings = dataclasses.replace(settings, clip=Clip())  # by the servers, which have the sum
            own = [OneReplica()] if self._remote.whole_batches else []
            source = GradientSource(self._model, self._strategy, store, settings, metrics, *own)
            created = Step(source, SummedByServers(), store)
            return created, TicketLoop(self, created, self._strategy, self._remote)

        return steps.custom_loop(("tickets", batch_size), create)

    def at(self, step: int) -> Mapping[str, float]:
        """See base class; the staleness of the gradients of the last call, in updates."""
        if not self._remote.whole_batches or not self._staleness:
            return {}
        return {"staleness": float(np.mean(self._staleness)), "max_staleness": float(max(self._staleness))}

    def finished(self, result: RangeResult) -> None:
        """Takes note of the result of a range of tickets."""
        self._staleness = [update.version - min(update.versions or (update.version,)) for update in result.updates]
        if self._remote.records_updates:
            self.updates += result.updates


def check_supported(
    model: keras.Model, remote: RemoteVariables, settings: Settings, metrics: ModelMetrics, rate: float
) -> None:
    """Raises `InputError` for what parameter servers do not support."""
    clips_by_all = bool(getattr(model.optimizer, "global_clipnorm", None)) and remote.servers.count > 1
    rules = (
        (bool(settings.loss_scale), "no loss scaling", "a loss scale", "--precision=mixed_bfloat16"),
        (rate != 1, "the same batch size in the whole run", "an elastic batch", "another --strategy"),
        (
            bool(remote.tables.numbers)
            and (settings.jit_compile or settings.micro_steps > 1 or metrics.count_all_rows),
            "an embedding that they split by rows in a step of one pass over independent rows, without XLA",
            "jit_compile, accumulate_steps, or outputs that depend on other rows",
            "a larger --min_table_bytes",
        ),
        (
            clips_by_all,
            "an optimizer whose update of a variable does not depend on the others, if there are several",
            "global_clipnorm",
            "--clip_norm, or the argument `clip` of Trainer",
        ),
        (
            remote.whole_batches and metrics.count_all_rows,
            "outputs and metrics for a row that do not depend on other rows, where workers compute whole batches",
            f"--staleness={remote.staleness} and a model with others",
            "--staleness=sync",
        ),
    )
    for is_refused, rule, received, remedy in rules:
        if is_refused:
            raise InputError(f"Parameter servers need {rule}. Received: {received}. Use {remedy}.")


class TicketLoop:
    """A call of the loop on one worker; see `Loop`."""

    def __init__(self, synchronizer: ServerSynchronizer, step: Step, strategy: Strategy, remote: RemoteVariables):
        """Initializes the loop.

        Args:
          synchronizer: told the result of each call.
          step: computes the gradients, which it does not reduce.
          strategy: the strategy.
          remote: the variables of this worker.
        """
        self._synchronizer, self._step, self._strategy = synchronizer, step, strategy
        self._remote, self._servers = remote, remote.servers
        self._rank = strategy.cluster.rank
        self._compute: Any = tf.function(self._computed, autograph=False, reduce_retracing=True)
        self._undo = tf.function(
            lambda computed: strategy.run(step.undo, computed), autograph=False, reduce_retracing=True
        )
        self._is_traced = False
        # Of all workers in the first one, which has them if a worker is lost; shares of a step may count all rows.
        self._metrics = [*map(keras_internals.value_of, step.source.metrics.variables)] if remote.whole_batches else []

    def __call__(
        self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor
    ) -> LoopResult:
        """Computes tickets until the range is done, and returns what all workers have computed."""
        first, end = int(first_step), int(first_step) + int(steps)
        call = _Call(end)
        batches = self._timed(iterator, call)
        if not self._is_traced:
            batches = self._traced(batches, getattr(iterator, "element_spec", None), with_norm)
        if self._strategy.is_chief:
            self._remote.tolerate_losses()
            self._remote.write_changes(version=first)
        self._servers.coordinate("open", worker=self._rank, first=first, end=end)
        read, goes_on = first, True  # the ticket of the next batch
        known: dict[int, Any] = {}  # batches that are needed if the workers that compute them are lost
        while goes_on and (taken := self._servers.coordinate("take", worker=self._rank)):
            ticket, version, computed = taken
            for number in range(read, ticket + 1):
                known[number] = next(batches)
            read = max(read, ticket + 1)
            known = {number: known[number] for number in known.keys() & {*computed}}
            batch, numbers = known[ticket]
            goes_on = self._one(call, ticket, version, batch, numbers, with_norm)
        for _ in range(read, end):
            next(batches)
        result = self._servers.result()
        for i, variable in enumerate(self._metrics):
            variable.assign(result.metrics[i] if result.metrics else tf.zeros_like(variable))
        updates = len(result.losses) - (not result.is_finite)
        norm = self._remote.pull_all(end if result.is_finite else 0)
        self._synchronizer.finished(result)
        return LoopResult(
            losses=tf.constant(result.losses, keras.config.floatx()),
            counted=tf.range(len(result.losses)) < updates,
            norm=tf.constant(result.norm if self._remote.whole_batches else norm, keras.config.floatx()),
            may_continue=tf.constant(result.is_finite),
            gradient_finite=(),
            wait_seconds=tf.constant(call.waited, tf.float64),
            compute_seconds=tf.constant([call.busy], tf.float64),
            numbers=tf.concat([tf.zeros([0], tf.int64), *result.numbers], 0),
            sizes=tf.constant([*map(len, result.numbers)] or [0] * len(result.losses), tf.int32),
        )

    def _one(
        self, call: "_Call", ticket: int, version: int, batch: Any, numbers: tf.Tensor, with_norm: tf.Tensor
    ) -> bool:
        """Computes a ticket from a version or a newer one, and pushes its gradient; returns whether the run goes on."""
        ids = self._remote.tables.ids(batch)
        versions, before, _ = self._remote.pull(version, ids)
        started = time.perf_counter()
        with self._remote.tables.known_ids():
            computed = self._compute(batch, tf.constant(ticket, tf.int64), with_norm)
        loss, is_finite, norm = float(computed.loss), bool(computed.finite), float(computed.norm)
        call.busy += time.perf_counter() - started
        if is_finite:
            after = [keras_internals.value_of(variable).numpy() for variable in self._remote.states]
            gradients = [gradient.numpy() for gradient in computed.gradients]
            with_norm_of_last = bool(with_norm) and ticket == call.end - 1
            self._servers.push(ticket, versions, gradients, before, after, ids=ids, with_norm=with_norm_of_last)
        else:
            self._undo(computed)
        arrays = [numbers.numpy(), *(variable.numpy() for variable in self._metrics)]
        return self._servers.commit(ticket, arrays, loss=loss, is_finite=is_finite, versions=versions, norm=norm)

    def _computed(self, *args: Any) -> Any:
        with self._remote.tables.in_step():
            return self._strategy.run(self._step.compute, *args)

    def _timed(self, iterator: Iterator[Any], call: "_Call") -> Iterator[tuple[Any, tf.Tensor]]:
        """Yields batches and the indices of their examples."""
        while True:
            started = time.perf_counter()
            element = next(iterator)
            call.waited += time.perf_counter() - started
            yield split_numbers(element, self._strategy)

    def _traced(self, batches: Iterator[Any], spec: Any, with_norm: tf.Tensor) -> Iterator[Any]:
        """Traces the step on all workers together, since they compare their traces; returns the same batches.

        With the spec of the data, if that is known: in a trace for a static batch size, divisions by it are rounded otherwise.
        """
        batch, numbers = next(batches)
        spec = batch if spec is None else spec.batch if isinstance(spec, IndexedBatch) else spec
        self._compute.get_concrete_function(spec, tf.constant(0, tf.int64), with_norm)
        unused = self._step.unused_variables()
        if self._strategy.is_chief and unused:
            self._servers.leave_out(sorted(unused))
        self._is_traced = True
        return itertools.chain([(batch, numbers)], batches)


@dataclasses.dataclass
class _Call:
    """What a call of the loop has done on this worker.

    Attributes:
      end: the ticket after its last one.
      waited: seconds of waiting for data.
      busy: seconds of computation.
    """

    end: int
    waited: float = 0.0
    busy: float = 0.0
