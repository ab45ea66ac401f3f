"""A training step without a flush: stages begin the forward passes of later batches before the update of earlier ones.

Stage s is w = S - 1 - s micro-batches ahead. In step t it computes, for each m < M, the forward pass of micro-batch
t M + m + w of the run and the backward pass of micro-batch t M + m, and then updates its weights. So a step ends with w
micro-batches pending. It returns the tensors that the next step needs of them, and every message is
received in the step in which it is sent. `tfdist.pipelining.schedule_catalog` has the equations.

The pending micro-batches are a function of the data and of the versions of the weights. Only the versions are saved: a run
that resumes computes these forward passes again. Therefore neither saving nor evaluating changes the result.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Recording, using
from tfdist.distribution.clock import time_after
from tfdist.distribution.strategy import State
from tfdist.gradients import Reducer
from tfdist.pipelining.activation_compression import Link
from tfdist.pipelining.execution import ActionClock, NoClock
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.passes import Forward, Passes
from tfdist.pipelining.stage_costs import CrossingSpec, crossing_specs
from tfdist.step import randomness
from tfdist.step.compiled_loop import FirstTrace, Loop, LoopReport, LoopResult, run_loop, split_numbers
from tfdist.step.layer_state import assign
from tfdist.step.pipelined_step import MicroBatch, PipelinedGradients, split_rows
from tfdist.step.reduction import Computed, run_if, square_norms
from tfdist.step.settings import named_specs
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step

Weights = list[tf.Tensor]


class PendingMicroBatch(NamedTuple):
    """A micro-batch between its forward and its backward pass.

    Attributes:
      residuals: tensors that the backward pass needs.
      share: its contribution to the reported loss.
      state: values of the stage's other variables, such as moving statistics, after its forward pass.
    """

    residuals: list[tf.Tensor]
    share: tf.Tensor
    state: list[tf.Tensor]


class PipelineState(NamedTuple):
    """The state of the stage between two steps.

    Attributes:
      state: values of the stage's other variables after the latest forward pass.
      latest: the latest batch that was read, in a list; empty if it is the one of the step before.
      received: tensors that the previous stage has sent for the next forward pass.
      pending: pending micro-batches, in their order.
    """

    state: list[tf.Tensor]
    latest: list[Any]
    received: list[tf.Tensor]
    pending: list[PendingMicroBatch]


class StageResult(NamedTuple):
    """The result of a step in one stage.

    Attributes:
      share: scalar; contribution of the stage to the loss of the global batch.
      finite: scalar bool; whether this and the stage's gradients are finite, so that it was updated. Other stages decide for
        themselves: in a pipeline without a flush, they may have been updated before this one knows its gradients.
      squares: scalar; sum of the squared gradients, if requested, else 0.
      gradient_finite: [variables] bool.
    """

    share: tf.Tensor
    finite: tf.Tensor
    squares: tf.Tensor
    gradient_finite: tf.Tensor


class DelayedStep(Step):
    """The step of one stage, whose gradients are computed with older weights.

    Attributes:
      delay: D, by how many updates the weights of a batch are older than the newest ones.
      read_ahead: how many steps before its own update a batch is read.
    """

    _strategy: HasStages
    source: PipelinedGradients

    def __init__(self, source: PipelinedGradients, reducer: Reducer, store: StateStore):
        """Initializes the step and creates its state; see base class."""
        super().__init__(source, reducer, store)
        schedule = self._strategy.schedule
        [(self._number, self._graph)] = source.model.stages.items()
        self._count = schedule.micro_batches
        self._ahead = schedule.stages - 1 - self._number
        self.delay = schedule.delays[self._number]
        self.read_ahead = -(-self._ahead // self._count)
        variables = self._graph.variables
        others = (*variables.non_trainable, *variables.others)
        self._others = [variable for variable in others if not variable.trainable]
        self._seed_indices = {id(state): index for index, state in enumerate(source.seeds)}
        # The weights of 1, 2, ... updates ago. An assignment shares the memory of the tensor that is assigned.
        self._older = [self._version(store, age + 1) for age in range(self.delay)]
        self._passes: Passes | None = None
        self._stage = _Stage(self, self._graph)

    def begin(self, step: tf.Tensor, batches: Sequence[Any]) -> PipelineState:
        """Computes the forward passes that precede a step. A replica function.

        Args:
          step: scalar int64; number of updates done.
          batches: the next `read_ahead` batches.
        """
        state = [tf.identity(keras_internals.value_of(variable)) for variable in self._others]
        pipeline_state = PipelineState(state, list(batches[-1:]), [], [])
        newer = self.weights()
        for version in self._older:
            for variable, value in zip(version, newer, strict=True):
                variable.assign(tf.where(tf.math.is_nan(variable), value, variable))
            newer = [tf.convert_to_tensor(variable) for variable in version]
        with using(self.source.collectives):
            passes = _TracedPasses(self, step, pipeline_state, dict(enumerate(batches)), NoClock())
            for index in range(self._ahead):
                received = passes.receive(FILL, index)
                passes.forward(index, received, FILL, index)
            return passes.pipeline_state(passes.receive(FILL, self._ahead))

    def advance(
        self, pipeline_state: PipelineState, batch: Any, step: tf.Tensor, with_norm: tf.Tensor, may_update: tf.Tensor
    ) -> tuple[PipelineState, StageResult]:
        """Computes a step of the stage, and updates its weights unless its gradients are not finite. A replica function.

        Args:
          pipeline_state: result of the step before.
          batch: this replica's rows of batch `step + read_ahead`.
          step: scalar int64; number of updates done.
          with_norm: scalar bool; whether to compute the norm.
          may_update: scalar bool; if False, nothing is updated.
        """
        self._recorded = Recording(self.source.collectives)
        self.source.begin()
        with using(self._recorded):
            values = self._side_effects.begin()
            batches = {self.read_ahead: batch}
            if pipeline_state.latest:
                batches[self.read_ahead - 1] = pipeline_state.latest[0]
            totals = self.source.totals(batch, self.batch_size) if self._graph.is_last else []
            passes = _TracedPasses(self, step, pipeline_state, batches, self.source.clock or NoClock(), totals)
            received = pipeline_state.received
            for index in range(self._count):
                passes.forward(self._ahead + index, received, "F", index)
                received = passes.receive("F", index)
                passes.backward(index)
            result = self._updated(passes, self._side_effects.end(values), with_norm, may_update)
        latest = [batch] if self.read_ahead else []
        return passes.pipeline_state(received)._replace(latest=latest), result

    def weights(self) -> Weights:
        """Returns the newest weights."""
        return [tf.identity(keras_internals.value_of(variable)) for variable in self.variables]

    def versions(self) -> list[Weights]:
        """Returns the weights of 0, 1, ... updates ago."""
        return [self.weights(), *([tf.convert_to_tensor(variable) for variable in each] for each in self._older)]

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        assert self.settings.batch_size is not None  # a pipeline's batches are equally large
        return self.settings.batch_size

    def passes(self, arguments: Any) -> Passes:
        """Returns the passes of the stage, traced when they are first needed."""
        if self._passes is None:
            self._passes = Passes(self._stage, arguments)
        return self._passes

    def seeded(self, state: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Returns values of the stage's other variables with the seeds of a step."""
        seeds = randomness.seed_values(self.source.seeds, self.settings.seed, step, self._strategy.collectives.rank)
        return [
            seeds[self._seed_indices[id(variable)]] if id(variable) in self._seed_indices else value
            for variable, value in zip(self._others, state, strict=True)
        ]

    def stateless_forward(
        self, micro_batch: MicroBatch, received: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns the tensors that the stage sends with its other variables, and its shares of the loss; see `forward`.

        Args:
          micro_batch: the micro-batch.
          received: values of the weights and of other variables, and tensors from the previous stage.
        """
        own = [*self.variables, *self._others]
        scope = keras_internals.RecordedScope(zip(own, received[: len(own)], strict=True))
        sent, value, recorded = self.source.forward(self._graph, micro_batch, received[len(own) :], values=scope)
        others = (tf.identity(scope.get_current_value(variable)) for variable in self._others)
        return [*sent, *others], value, recorded

    def _version(self, store: StateStore, age: int) -> list[tf.Variable]:
        """Returns variables for the weights of some updates ago; NaN stands for a version that does not exist yet."""
        states = [
            State(f"delayed/{spec.name}/{age}", tuple(spec.shape), spec.dtype, per_replica=False, initial=math.nan)
            for spec in named_specs(self.variables)
        ]
        return store.variables(states)

    def _updated(
        self, passes: "_TracedPasses", before: list[tf.Tensor], with_norm: tf.Tensor, may_update: tf.Tensor
    ) -> StageResult:
        """Reduces the gradients of the step and applies them, in the last of its operations."""
        assert self._passes
        uses = self._passes.uses[: len(self.variables)]
        self.source.without_gradient.append(frozenset(index for index, is_used in enumerate(uses) if not is_used))
        with tf.control_dependencies(passes.results[-1]):
            gradients = [tf.identity(gradient) for gradient in passes.sums]
        reduced = self._reduced([*gradients, passes.share])
        *gradients_of_batch, value = reduced.totals
        finite = tf.logical_and(may_update, reduced.all_finite(value))
        zero = tf.zeros([], value.dtype)
        squares = tf.cond(with_norm, lambda: tf.add_n([zero, *square_norms(gradients_of_batch)]), lambda: zero)
        no_time = tf.zeros([], tf.float64)
        clipped = self.settings.clip(gradients_of_batch, zero)  # by value only: clipping by norm is refused
        computed = Computed(clipped, reduced.state, [], before, value, finite, squares, no_time, no_time)
        unused = self.unused()

        def apply() -> None:
            self.apply(computed, unused)
            for version, values in zip(self._older, passes.versions, strict=False):
                assign(version, values)
            assign(self._others, passes.state)

        return StageResult(
            value, finite, squares, run_if(finite, apply, lambda: self.undo(computed), gradients_of_batch)
        )


FILL = "fill"


class _TracedPasses:
    """The passes of a step, or before the first one, while they are traced.

    Attributes:
      versions: the weights of 0, 1, ... updates ago.
      sums: sums of the gradients of the weights.
      share: sum of the shares of the loss.
      state: values of the stage's other variables after the latest backward pass's micro-batch.
      results: results of each pass, in their order.
    """

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
        self._stage, self._link, self._clock = step._stage, step.source.messages, clock
        self._parts = {ahead: split_rows(batch, step._count) for ahead, batch in batches.items()}
        self.versions = step.versions()
        self._pending = deque(pipeline_state.pending)
        self._latest = pipeline_state.state
        self.sums = [tf.zeros(v.shape, v.dtype) for v in step.variables]
        self.share = tf.zeros([], keras.config.floatx())
        self.state: list[tf.Tensor] = []
        self.results: list[list[tf.Tensor]] = [[], []]

    def pipeline_state(self, received: list[tf.Tensor]) -> PipelineState:
        """Returns the state for the next step, with the same latest batch."""
        latest = self._pipeline_state.latest
        return self._pipeline_state._replace(
            state=self._latest, received=received, pending=list(self._pending), latest=latest
        )

    def receive(self, kind: str, index: int) -> list[tf.Tensor]:
        """Returns the tensors that the previous stage has sent with this tag; none in the first stage."""
        stage = self._stage
        if not stage.number:
            return []
        with tf.control_dependencies(self.results[-2]):
            specs = [crossing.spec for crossing in stage.from_before]
            return Link(self._link, stage.number - 1).receive(specs, f"{stage.number - 1}{kind}{index}")

    def forward(self, ahead: int, received: list[tf.Tensor], kind: str, index: int) -> None:
        """Computes the forward pass of the micro-batch `ahead` after the step's first one, and sends the result."""
        step, stage = self._step, self._stage
        batch, part = divmod(ahead, step._count)
        number = self._number + batch
        state = self._latest if part else step.seeded(self._latest, number)
        replica = step._strategy.collectives.rank
        rows = self._parts[batch][part]
        arguments = MicroBatch(rows, tf.constant(part), number, replica, self._totals, step.batch_size)
        stage_passes = step.passes(arguments)
        with tf.control_dependencies(self._clock.begin(self.results[-1], received)):
            result = stage_passes.forward(arguments, [*self.versions[step.delay - batch], *state, *received])
        count = len(stage.to_next)
        sent, self._latest = result.sent[:count], result.sent[count:]
        self._pending.append(PendingMicroBatch(list(result.residuals), result.share, list(self._latest)))
        if sent:
            Link(self._link, stage.number + 1).send(sent, f"{stage.number}{kind}{index}")
        self.results.append([*result.sent, result.share])
        self._clock.end(self.results[-1])

    def backward(self, index: int) -> None:
        """Computes the backward pass of the first pending micro-batch, and sends the gradients of its inputs."""
        step, stage, micro_batch = self._step, self._stage, self._pending.popleft()
        specs = [crossing.spec for crossing in stage.to_next if crossing.has_gradient]
        gradients: list[tf.Tensor] = []
        if specs:
            with tf.control_dependencies(self.results[-2]):
                gradients = Link(self._link, stage.number + 1).receive(specs, f"{stage.number + 1}B{index}")
        assert step._passes
        with tf.control_dependencies(self._clock.begin(self.results[-1], gradients)):
            gradients_of_inputs = step._passes.backward(micro_batch.residuals, gradients).of_inputs
        own, sent = gradients_of_inputs[: len(step.variables)], gradients_of_inputs[len(step.variables) :]
        self.sums = [before + gradient for before, gradient in zip(self.sums, own, strict=True)]
        self.share += micro_batch.share
        self.state = micro_batch.state
        if sent:
            Link(self._link, stage.number - 1).send(sent, f"{stage.number}B{index}")
        self.results.append([*sent, *self.sums])
        self._clock.end(self.results[-1])


class _Stage:
    """A stage as a function of its weights and its other variables, which are passed like received tensors.

    Attributes:
      number: number of the stage.
      from_before: specs of the tensors from the previous stage.
      to_next: specs of the tensors for the next stage.
    """

    variables: Sequence[tf.Variable] = ()

    def __init__(self, step: DelayedStep, graph: Any):
        self._step = step
        self.number = graph.index
        rows = step.batch_size // step._strategy.replicas // step._count
        self.from_before, self.to_next = crossing_specs(graph.received, rows), crossing_specs(graph.sent, rows)
        state = [_crossing(variable, has_gradient=False) for variable in step._others]
        weights = [_crossing(variable, has_gradient=True) for variable in step.variables]
        self.received, self.sent = [*weights, *state, *self.from_before], [*self.to_next, *state]

    def forward(self, arguments: Any, received: Sequence[tf.Tensor]) -> Forward:
        """See `tfdist.pipelining.passes.Stage`."""
        return Forward(*self._step.stateless_forward(arguments, received))

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """See `tfdist.pipelining.passes.Stage`; only received tensors have gradients."""
        return []


def _crossing(variable: Any, *, has_gradient: bool) -> CrossingSpec:
    return CrossingSpec(tf.TensorSpec(variable.shape, variable.dtype), has_gradient)


class _StepState(NamedTuple):
    """The state between two steps.

    Attributes:
      pipeline_state: state of the stage.
      numbers: indices of the examples of the batches that were read ahead, in their order.
    """

    pipeline_state: PipelineState
    numbers: list[tf.Tensor]


class _LoopState(NamedTuple):
    """The variables of the loop.

    Attributes:
      step_state: state between two steps.
      all_finite: scalar bool; whether all steps of this stage were finite so far.
      squares: scalar; sum of the squared gradients of the latest step, if requested.
      gradient_finite: [variables] bool.
    """

    step_state: _StepState
    all_finite: tf.Tensor
    squares: tf.Tensor
    gradient_finite: tf.Tensor


@dataclasses.dataclass
class _CallState:
    """The state between two calls of the loop."""

    iterator: Any = None
    step: int = -1
    step_state: _StepState | None = None


def compile_delayed_loop(step: DelayedStep, strategy: HasStages, end: Callable[[], int]) -> Loop:
    """Returns a function as `compile_loop` does; `end` returns the step at which the run ends: no later batch is read."""
    call_state, first = _CallState(), FirstTrace(strategy)

    @tf.function(autograph=False, reduce_retracing=True)
    def begin(iterator: Iterator[Any], first_step: tf.Tensor, end_step: tf.Tensor) -> _StepState:
        batches: list[Any] = []
        numbers: list[tf.Tensor] = []
        for index in range(step.read_ahead):
            latest = (batches[-1], numbers[-1]) if batches else None
            batch, of_examples = _read(iterator, strategy, first_step + index < end_step, latest)
            batches.append(batch)
            numbers.append(of_examples)
        with first.of("begin"):
            return _StepState(strategy.run(step.begin, first_step, batches), numbers)

    @tf.function(autograph=False, reduce_retracing=True)
    def run(
        iterator: Iterator[Any],
        first_step: tf.Tensor,
        steps: tf.Tensor,
        with_norm: tf.Tensor,
        end_step: tf.Tensor,
        step_state: _StepState,
    ) -> tuple[_StepState, LoopResult]:
        def one(done: tf.Tensor, loop_state: _LoopState) -> tuple[_LoopState, LoopReport]:
            number, step_state = first_step + tf.cast(done, tf.int64), loop_state.step_state
            started = tf.timestamp()
            latest = (step_state.pipeline_state.latest[0], step_state.numbers[-1]) if step.read_ahead else None
            with tf.control_dependencies([started]):
                batch, numbers = _read(iterator, strategy, number + step.read_ahead < end_step, latest)
            waited = time_after(batch) - started
            needs_norm = tf.logical_and(with_norm, tf.equal(done, steps - 1))
            with first.of("advance"):
                pipeline_state, result = strategy.run(
                    step.advance, step_state.pipeline_state, batch, number, needs_norm, loop_state.all_finite
                )
            own, *others = [*step_state.numbers, numbers]
            report = tf.stack([tf.cast(x, tf.float64) for x in (result.share, result.finite)])
            gradient_finite = tf.where(loop_state.all_finite, result.gradient_finite, loop_state.gradient_finite)
            step_state = _with_shapes(_StepState(pipeline_state, others), step_state)
            progress = _LoopState(step_state, result.finite, result.squares, gradient_finite)
            return progress, LoopReport([report], waited, tf.zeros([1], tf.float64), own)

        zero, all_finite = tf.zeros([], keras.config.floatx()), tf.ones([len(step.variables)], tf.bool)
        start = _LoopState(step_state, tf.constant(True), zero, all_finite)
        end, report = run_loop(one, start, steps, [tf.TensorSpec([2], tf.float64)], strategy)
        return end.step_state, _merge_reports(end, report, strategy)

    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        end_step = tf.constant(end(), tf.int64)
        if call_state.iterator is not iterator or call_state.step != int(first_step):
            call_state.step_state = begin(iterator, first_step, end_step)
        step_state, result = run(iterator, first_step, steps, with_norm, end_step, call_state.step_state)
        call_state.iterator, call_state.step, call_state.step_state = iterator, int(first_step) + int(steps), step_state
        return result

    return loop


def compile_timed_steps(
    step: DelayedStep, strategy: HasStages, clock: ActionClock, count: int
) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """Returns a function (batch, number of the first step) -> times of the actions of `count` steps, which update nothing.

    All steps compute this batch; the step must have this clock.
    """

    @tf.function(autograph=False)
    def times(batch: Any, number: tf.Tensor) -> tf.Tensor:
        no_update = number < 0

        def body(
            done: tf.Tensor, before: PipelineState, times: tf.TensorArray
        ) -> tuple[tf.Tensor, PipelineState, tf.TensorArray]:
            pipeline_state, _ = strategy.run(step.advance, before, batch, number, no_update, no_update)
            return done + 1, _with_shapes(pipeline_state, before), times.write(done, clock.read())

        pipeline_state = strategy.run(step.begin, number, [batch] * step.read_ahead)
        times = tf.TensorArray(tf.float64, size=count, element_shape=[None, 2])
        start = (tf.constant(0), pipeline_state, times)
        _, _, times = tf.while_loop(lambda done, *_: done < count, body, start, parallel_iterations=1)
        return times.concat()

    return times


def _read(iterator: Iterator[Any], strategy: HasStages, is_needed: tf.Tensor, latest: Any) -> Any:
    """Returns the next batch and the indices of its examples, or at the end of the run the latest once more.

    Args:
      iterator: iterator of the batches.
      strategy: the strategy.
      is_needed: scalar bool; whether there is a next batch.
      latest: the latest batch and its indices; None if there is a next batch.
    """
    if latest is None:
        return split_numbers(next(iterator), strategy)
    batch = tf.cond(is_needed, lambda: split_numbers(next(iterator), strategy), lambda: latest)
    return _with_shapes(batch, latest)


def _with_shapes(tensors: Any, before: Any) -> Any:
    """Returns the tensors with the static shapes of `before`."""
    return tf.nest.map_structure(lambda x, y: tf.ensure_shape(x, y.shape), tensors, before)


def _merge_reports(last_state: _LoopState, report: LoopReport, strategy: HasStages) -> LoopResult:
    """Merges the reports of all stages, in one message.

    Args:
      last_state: variables of the loop after the last step.
      report: of each step, [2] float64: its share of the loss, and whether the stage was updated.
      strategy: the strategy.
    """
    own = tf.concat([report.values[0], [[tf.cast(last_state.squares, tf.float64), 1.0]]], axis=0)

    def gather() -> tf.Tensor:
        return strategy.pipeline_collectives.all_gather([own], name="stages/reports")[0]

    everyone = tf.reshape(strategy.run(gather), [strategy.grid.stages, -1, 2])
    shares, updated = tf.unstack(everyone, axis=-1)  # each [stages, steps + 1]
    not_finite = tf.reduce_any(tf.equal(updated[:, :-1], 0), axis=0)
    failed = tf.reduce_any(not_finite)
    done = tf.where(failed, tf.argmax(tf.cast(not_finite, tf.int32)) + 1, tf.size(not_finite, tf.int64))
    losses, floatx = tf.reduce_sum(shares[:, :-1], axis=0), keras.config.floatx()
    return LoopResult(
        losses=tf.cast(losses[:done], floatx),
        counted=tf.logical_not(not_finite)[:done],
        norm=tf.cast(tf.sqrt(tf.reduce_sum(shares[:, -1])), floatx),
        may_continue=tf.logical_not(failed),
        gradient_finite=last_state.gradient_finite,
        waited=report.waited,
        busy=report.busy,
        numbers=report.numbers,
        stage_updates=tf.reduce_sum(tf.cast(updated[:, :-1], tf.int32), axis=1),
    )
