"""A training step without a flush: stages begin the forward passes of later batches before earlier batches are applied.

Stage s is w = S - 1 - s micro-batches ahead. In step t it computes, for each m < M, the forward pass of micro-batch
t M + m + w of the run and the backward pass of micro-batch t M + m, and then updates its weights. A step therefore ends
with w pending micro-batches, and returns the tensors that the next step needs. Every message is received in the step in
which it is sent. `tfdist.pipelining.schedule_catalog` has the equations.

The pending micro-batches are a function of the data and of the versions of the weights. Only the versions are saved; a
resumed run recomputes the forward passes. Saving and evaluation therefore do not change the result.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import collectives_scope
from tfdist.distribution.clock import time_after
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import split_at
from tfdist.pipelining.activation_compression import Link
from tfdist.pipelining.execution import NO_CLOCK, ActionClock
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.passes import Forward, Passes
from tfdist.pipelining.stage_costs import CrossingSpec, crossing_specs
from tfdist.step import randomness
from tfdist.step.compiled_loop import (
    Loop,
    LoopReport,
    LoopResult,
    count_steps,
    first_trace,
    run_loop,
    split_example_indices,
)
from tfdist.step.layer_state import assign
from tfdist.step.pipelined_step import MicroBatch, PipelinedGradients, split_rows
from tfdist.step.reduction import ComputeResult, run_if, square_norms
from tfdist.step.settings import named_specs
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step

Weights = list[tf.Tensor]
StepState = tuple[Any, list[tf.Tensor]]  # a `PipelineState`, and the indices of examples that were read ahead


class PendingMicroBatch(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    residuals: list[tf.Tensor]  # tensors that the backward pass needs
    share: tf.Tensor  # contribution to the reported loss
    state: list[tf.Tensor]  # values of the stage's non-trainable variables after this micro-batch's forward pass


class PipelineState(NamedTuple):
    """The state of the stage between two steps."""

    state: list[tf.Tensor]  # values of the stage's non-trainable variables after the latest forward pass
    latest: list[Any]  # the latest batch that was read, as the only element; empty without read-ahead
    received: list[tf.Tensor]  # tensors that the previous stage sent for the next forward pass
    pending: list[PendingMicroBatch]  # pending micro-batches, in order


class StageResult(NamedTuple):
    """The result of a step in one stage."""

    share: tf.Tensor  # scalar; contribution of the stage to the loss of the global batch
    # Scalar bool; whether the share and the stage's gradients are finite, so the stage was updated. Each stage decides
    # separately, because without a flush, other stages may be updated before this one has its gradients.
    finite: tf.Tensor
    squares: tf.Tensor  # scalar; sum of the squared gradients, if requested, else 0
    gradient_finite: tf.Tensor  # [variables] bool


class DelayedStep:
    """The step of one stage, with gradients of older weights.

    It also implements the stage interface of `Passes`. Weights and other variables are passed to it in the same way as
    tensors of the previous stage, so that only received tensors have gradients.
    """

    variables: Sequence[tf.Variable] = ()

    def __init__(self, step: Step, store: StateStore):
        assert isinstance(step.source, PipelinedGradients)
        assert step.settings.batch_size is not None  # all batches of a pipeline have the same size
        self.step, self.source = step, step.source
        self.batch_size: int = step.settings.batch_size  # rows of the global batch
        strategy = self.source.strategy
        schedule = strategy.schedule
        [(self.number, self._graph)] = self.source.model.stages.items()
        self.count = schedule.micro_batches
        self._lead = schedule.stages - 1 - self.number
        self.delay = schedule.delays[self.number]  # D, the age of a batch's weights in updates
        self.read_ahead = -(-self._lead // self.count)  # number of steps between reading a batch and the update with it
        variables = self._graph.variables
        candidates = (*variables.all, *variables.external)
        self._state_variables = [variable for variable in candidates if not variable.trainable]
        self._seed_indices = {id(state): index for index, state in enumerate(self.source.seeds)}
        # The weights of 1, 2, ... updates ago; NaN marks a version that does not exist yet. They take no additional memory
        # when they are assigned, because a variable shares the memory of the assigned tensor.
        specs = named_specs(step.variables)
        states = [State(f"delayed/{spec.name}", tuple(spec.shape), spec.dtype, False, math.nan) for spec in specs]
        self._old_versions = [
            store.variables([replace(state, name=f"{state.name}/{age}") for state in states])
            for age in range(1, self.delay + 1)
        ]
        self._passes: Passes | None = None
        rows = self.batch_size // strategy.replicas // self.count
        self.input_specs = crossing_specs(self._graph.received, rows)  # of the tensors from the previous stage
        self.output_specs = crossing_specs(self._graph.sent, rows)  # of the tensors for the next stage
        state = [CrossingSpec(tf.TensorSpec(v.shape, v.dtype), has_gradient=False) for v in self._state_variables]
        weights = [CrossingSpec(tf.TensorSpec(v.shape, v.dtype), has_gradient=True) for v in step.variables]
        # Specs of all arguments and results of a forward pass
        self.received, self.sent = [*weights, *state, *self.input_specs], [*self.output_specs, *state]

    def begin(self, step: tf.Tensor, batches: Sequence[Any]) -> PipelineState:
        """Computes the forward passes of the next `read_ahead` batches that precede step `step`. A replica function."""
        state = [tf.identity(keras_internals.value_of(variable)) for variable in self._state_variables]
        pipeline_state = PipelineState(state, list(batches[-1:]), [], [])
        newer_weights = self.weights()
        for version in self._old_versions:
            for variable, value in zip(version, newer_weights, strict=True):
                variable.assign(tf.where(tf.math.is_nan(variable), value, variable))
            newer_weights = [tf.convert_to_tensor(variable) for variable in version]
        with collectives_scope(self.source.collectives):
            passes = _TracedPasses(self, step, pipeline_state, dict(enumerate(batches)), NO_CLOCK)
            for index in range(self._lead):
                received = passes.receive(FILL, index)
                passes.forward(index, received, FILL, index)
            return passes.pipeline_state(passes.receive(FILL, self._lead))

    def advance(
        self,
        pipeline_state: PipelineState,
        batch: Any,
        step: tf.Tensor,
        with_gradient_norm: tf.Tensor,
        may_update: tf.Tensor,
    ) -> tuple[PipelineState, StageResult]:
        """Computes a step of the stage, and updates its weights unless its gradients are not finite. A replica function.

        `pipeline_state` is the state after the previous step, `batch` has this replica's rows of batch `step +
        read_ahead`, and `step` is a scalar int64, the number of completed updates. If `may_update`, a scalar bool, is False,
        nothing is updated.
        """
        self.source.begin()
        with collectives_scope(self.step.begin_trace()):
            values = self.step.side_effects.begin()
            latest = pipeline_state.latest
            batches = dict(enumerate([*latest, batch], start=self.read_ahead - len(latest)))
            totals = self.source.totals(batch, self.batch_size) if self._graph.is_last else []
            passes = _TracedPasses(self, step, pipeline_state, batches, self.source.clock, totals)
            received = pipeline_state.received
            for index in range(self.count):
                passes.forward(self._lead + index, received, "F", index)
                received = passes.receive("F", index)
                passes.backward(index)
            result = self._update(passes, self.step.side_effects.end(values), with_gradient_norm, may_update)
        latest = [batch] if self.read_ahead else []
        return passes.pipeline_state(received)._replace(latest=latest), result

    def weights(self) -> Weights:
        """Returns the newest weights."""
        return [tf.identity(keras_internals.value_of(variable)) for variable in self.step.variables]

    def versions(self) -> list[Weights]:
        """Returns the weights of 0, 1, ... updates ago."""
        old_versions = [[tf.convert_to_tensor(variable) for variable in version] for version in self._old_versions]
        return [self.weights(), *old_versions]

    def passes(self, arguments: Any) -> Passes:
        """Returns the passes of the stage, which are traced at the first call."""
        if self._passes is None:
            self._passes = Passes(self, arguments)
        return self._passes

    def seed_state(self, state: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Returns the values of the stage's non-trainable variables, with the seeds of a step."""
        rank, seed = self.source.strategy.collectives.rank, self.step.settings.seed
        seeds = randomness.seed_values(self.source.seeds, seed, step, rank)
        return [
            seeds[self._seed_indices[id(variable)]] if id(variable) in self._seed_indices else value
            for variable, value in zip(self._state_variables, state, strict=True)
        ]

    def forward(self, micro_batch: MicroBatch, received: Sequence[tf.Tensor]) -> Forward:
        """See `tfdist.pipelining.passes.Stage`."""
        variables = [*self.step.variables, *self._state_variables]
        scope = keras_internals.RecordedScope(zip(variables, received[: len(variables)], strict=True))
        tensors = received[len(variables) :]
        sent, value, recorded_value = self.source.forward(self._graph, micro_batch, tensors, values=scope)
        new_state = (tf.identity(scope.get_current_value(variable)) for variable in self._state_variables)
        return Forward([*sent, *new_state], value, recorded_value)

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns no gradients; see `tfdist.pipelining.passes.Stage`."""
        return []

    def _update(
        self,
        passes: "_TracedPasses",
        initial_values: list[tf.Tensor],
        with_gradient_norm: tf.Tensor,
        may_update: tf.Tensor,
    ) -> StageResult:
        assert self._passes
        uses = self._passes.uses[: len(self.step.variables)]
        self.source.unused_indices.append(frozenset(index for index, is_used in enumerate(uses) if not is_used))
        with tf.control_dependencies(passes.results[-1]):
            gradients = [tf.identity(gradient) for gradient in passes.sums]
        reduction = self.step.reduce([*gradients, passes.share])
        *batch_gradients, value = reduction.totals
        finite = tf.logical_and(may_update, reduction.all_finite(value))
        zero = tf.zeros([], value.dtype)
        squares = tf.cond(with_gradient_norm, lambda: tf.add_n([zero, *square_norms(batch_gradients)]), lambda: zero)
        no_time = tf.zeros([], tf.float64)
        clipped_gradients = self.step.settings.clip(batch_gradients, zero)  # by value, never by norm
        values = initial_values, value, finite, squares, no_time, no_time
        result = ComputeResult(clipped_gradients, reduction.state, [], *values)
        unused_indices = self.step.unused_variables()

        def apply() -> None:
            self.step.apply(result, unused_indices)
            for version, values in zip(self._old_versions, passes.versions, strict=False):
                assign(version, values)
            assign(self._state_variables, passes.state)

        gradient_finite = run_if(finite, apply, lambda: self.step.undo(result), batch_gradients)
        return StageResult(value, finite, squares, gradient_finite)


FILL = "fill"  # prefix of the message tags of forward passes before the first step


class _TracedPasses:
    """The traced passes of a step, or the forward passes before the first step."""

    def __init__(
        self,
        step: DelayedStep,
        number: tf.Tensor,
        pipeline_state: PipelineState,
        batches: Mapping[int, Any],
        clock: ActionClock,
        totals: Sequence[tf.Tensor] = (),
    ):
        self._step, self._number, self._pipeline_state, self._totals = step, number, pipeline_state, list(totals)
        self._link, self._clock = step.source.messages, clock
        self._parts = {ahead: split_rows(batch, step.count) for ahead, batch in batches.items()}
        self.versions = step.versions()  # the weights of 0, 1, ... updates ago
        self._pending = deque(pipeline_state.pending)
        self._latest_state = pipeline_state.state
        self.sums = [tf.zeros(v.shape, v.dtype) for v in step.step.variables]  # of the gradients of the weights
        self.share = tf.zeros([], keras.config.floatx())  # sum of the micro-batches' shares of the loss
        self.state: list[tf.Tensor] = []  # values of other variables after the micro-batch of the latest backward pass
        self.results: list[list[tf.Tensor]] = [[], []]  # results of each pass, in order

    def pipeline_state(self, received: list[tf.Tensor]) -> PipelineState:
        """Returns the state for the next step, with the same latest batch."""
        return PipelineState(self._latest_state, self._pipeline_state.latest, received, list(self._pending))

    def receive(self, kind: str, index: int) -> list[tf.Tensor]:
        """Returns the tensors that the previous stage sent with this tag; empty in the first stage."""
        stage = self._step
        if not stage.number:
            return []
        with tf.control_dependencies(self.results[-2]):
            specs = [crossing.spec for crossing in stage.input_specs]
            return Link(self._link, stage.number - 1).receive(specs, f"{stage.number - 1}{kind}{index}")

    def forward(self, offset: int, received: list[tf.Tensor], kind: str, index: int) -> None:
        """Computes the forward pass of micro-batch `offset`, counted from the first of this step, and sends the result."""
        step = self._step
        batch, part = divmod(offset, step.count)
        number = self._number + batch
        state = self._latest_state if part else step.seed_state(self._latest_state, number)
        replica = step.source.strategy.collectives.rank
        rows = self._parts[batch][part]
        arguments = MicroBatch(rows, tf.constant(part), number, replica, self._totals, step.batch_size)
        stage_passes = step.passes(arguments)
        with tf.control_dependencies(self._clock.begin(self.results[-1], received)):
            result = stage_passes.forward(arguments, [*self.versions[step.delay - batch], *state, *received])
        count = len(step.output_specs)
        sent, self._latest_state = result.sent[:count], result.sent[count:]
        self._pending.append(PendingMicroBatch(list(result.residuals), result.share, list(self._latest_state)))
        if sent:
            Link(self._link, step.number + 1).send(sent, f"{step.number}{kind}{index}")
        self.results.append([*result.sent, result.share])
        self._clock.end(self.results[-1])

    def backward(self, index: int) -> None:
        """Computes the backward pass of the first pending micro-batch, and sends the gradients of its inputs."""
        step, micro_batch = self._step, self._pending.popleft()
        gradients: list[tf.Tensor] = []
        if specs := [crossing.spec for crossing in step.output_specs if crossing.has_gradient]:
            with tf.control_dependencies(self.results[-2]):
                gradients = Link(self._link, step.number + 1).receive(specs, f"{step.number + 1}B{index}")
        assert step._passes
        with tf.control_dependencies(self._clock.begin(self.results[-1], gradients)):
            _, input_gradients = step._passes.backward(micro_batch.residuals, gradients)
        weight_gradients, sent_gradients = split_at(input_gradients, len(self.sums))
        self.sums = [total + gradient for total, gradient in zip(self.sums, weight_gradients, strict=True)]
        self.share += micro_batch.share
        self.state = micro_batch.state
        if sent_gradients:
            Link(self._link, step.number - 1).send(sent_gradients, f"{step.number}B{index}")
        self.results.append([*sent_gradients, *self.sums])
        self._clock.end(self.results[-1])


def compile_delayed_loop(step: DelayedStep, strategy: HasStages, end: Callable[[], int]) -> Loop:
    """Returns a `Loop`. `end` returns the step at which the run ends, beyond which no batch is read."""
    trace = first_trace(strategy)
    previous: tuple[Any, int, Any] = None, -1, None  # iterator, next step, and state after the previous call

    @tf.function(autograph=False, reduce_retracing=True)
    def begin(iterator: Iterator[Any], first_step: tf.Tensor, end_step: tf.Tensor) -> StepState:
        elements: list[Any] = []
        for index in range(step.read_ahead):
            latest = elements[-1] if elements else None
            elements.append(_read(iterator, strategy, first_step + index < end_step, latest))
        with trace("begin"):
            state = strategy.run(step.begin, first_step, [batch for batch, _ in elements])
        return state, [example_indices for _, example_indices in elements]

    @tf.function(autograph=False, reduce_retracing=True)
    def run(
        iterator: Iterator[Any],
        first_step: tf.Tensor,
        steps: tf.Tensor,
        with_gradient_norm: tf.Tensor,
        end_step: tf.Tensor,
        step_state: StepState,
    ) -> tuple[StepState, LoopResult]:
        # The state is (state of the step, whether all previous steps of this stage were finite, sum of the squared gradients
        # of the latest step if requested, whether the gradient of each variable was finite).
        def run_step(index: tf.Tensor, loop_state: Any) -> tuple[Any, LoopReport]:
            step_state, all_finite, _, was_gradient_finite = loop_state
            pipeline_state, previous_indices = step_state
            number, start_time = first_step + tf.cast(index, tf.int64), tf.timestamp()
            latest = (pipeline_state.latest[0], previous_indices[-1]) if step.read_ahead else None
            with tf.control_dependencies([start_time]):
                batch, example_indices = _read(iterator, strategy, number + step.read_ahead < end_step, latest)
            wait_seconds = time_after(batch) - start_time
            needs_norm = tf.logical_and(with_gradient_norm, tf.equal(index, steps - 1))
            with trace("advance"):
                arguments = pipeline_state, batch, number, needs_norm, all_finite
                pipeline_state, result = strategy.run(step.advance, *arguments)
            all_indices: list[tf.Tensor] = [*previous_indices, example_indices]
            report = tf.stack([tf.cast(x, tf.float64) for x in (result.share, result.finite)])
            gradient_finite = tf.where(all_finite, result.gradient_finite, was_gradient_finite)
            step_state = _with_shapes((pipeline_state, all_indices[1:]), step_state)
            progress = step_state, result.finite, result.squares, gradient_finite
            return progress, LoopReport([report], wait_seconds, tf.zeros([1], tf.float64), all_indices[0])

        zero, all_finite = tf.zeros([], keras.config.floatx()), tf.ones([len(step.step.variables)], tf.bool)
        initial_state = step_state, tf.constant(True), zero, all_finite
        final_state, report = run_loop(run_step, initial_state, steps, [tf.TensorSpec([2], tf.float64)], strategy)
        step_state, _, squares, gradient_finite = final_state
        return step_state, _merge_reports(squares, gradient_finite, report, strategy)

    def loop(
        iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> LoopResult:
        nonlocal previous
        end_step = tf.constant(end(), tf.int64)
        previous_iterator, next_step, step_state = previous
        if previous_iterator is not iterator or next_step != int(first_step):
            step_state = begin(iterator, first_step, end_step)
        step_state, result = run(iterator, first_step, steps, with_gradient_norm, end_step, step_state)
        previous = iterator, int(first_step) + int(steps), step_state
        return result

    return loop


def compile_timed_steps(
    step: DelayedStep, strategy: HasStages, clock: ActionClock, count: int
) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """Returns a function (batch, first step number) -> action times of `count` steps, without updates.

    All steps use the same batch. The step must have been created with this clock.
    """

    @tf.function(autograph=False)
    def times(batch: Any, number: tf.Tensor) -> tf.Tensor:
        no_update = number < 0

        def body(
            index: tf.Tensor, previous_state: PipelineState, times: tf.TensorArray
        ) -> tuple[tf.Tensor, PipelineState, tf.TensorArray]:
            pipeline_state, _ = strategy.run(step.advance, previous_state, batch, number, no_update, no_update)
            return index + 1, _with_shapes(pipeline_state, previous_state), times.write(index, clock.read())

        pipeline_state = strategy.run(step.begin, number, [batch] * step.read_ahead)
        times = tf.TensorArray(tf.float64, size=count, element_shape=[None, 2])
        initial_state = (tf.constant(0), pipeline_state, times)
        _, _, times = tf.while_loop(lambda index, *_: index < count, body, initial_state, parallel_iterations=1)
        return times.concat()

    return times


def _read(iterator: Iterator[Any], strategy: HasStages, is_needed: tf.Tensor, latest: Any) -> Any:
    """Returns the next batch and the indices of its examples, or `latest` again if not `is_needed`.

    `latest` is None if a batch is always needed.
    """
    if latest is None:
        return split_example_indices(next(iterator), strategy)
    batch = tf.cond(is_needed, lambda: split_example_indices(next(iterator), strategy), lambda: latest)
    return _with_shapes(batch, latest)


def _with_shapes(tensors: Any, reference: Any) -> Any:
    return tf.nest.map_structure(lambda x, y: tf.ensure_shape(x, y.shape), tensors, reference)


def _merge_reports(
    squares: tf.Tensor, gradient_finite: tf.Tensor, report: LoopReport, strategy: HasStages
) -> LoopResult:
    """Merges the reports of all stages with one all-gather.

    `report` has, for each step, [2] float64: the stage's share of the loss, and whether the stage was updated.
    """
    local_report = tf.concat([report.values[0], [[tf.cast(squares, tf.float64), 1.0]]], axis=0)
    collectives = strategy.pipeline_collectives
    reports = strategy.run(lambda: collectives.all_gather([local_report], name="stages/reports")[0])
    reports = tf.reshape(reports, [strategy.grid.stages, -1, 2])
    shares, is_updated = tf.unstack(reports, axis=-1)  # each [stages, steps + 1]
    not_finite = tf.reduce_any(tf.equal(is_updated[:, :-1], 0), axis=0)
    step_count = count_steps(not_finite)
    losses, floatx = tf.reduce_sum(shares[:, :-1], axis=0), keras.config.floatx()
    return LoopResult(
        losses=tf.cast(losses[:step_count], floatx),
        is_finite=tf.logical_not(not_finite)[:step_count],
        norm=tf.cast(tf.sqrt(tf.reduce_sum(shares[:, -1])), floatx),
        may_continue=tf.logical_not(tf.reduce_any(not_finite)),
        gradient_finite=gradient_finite,
        wait_seconds=report.wait_seconds,
        compute_seconds=report.compute_seconds,
        example_indices=report.example_indices,
        stage_updates=tf.reduce_sum(tf.cast(is_updated[:, :-1], tf.int32), axis=1),
    )
