"""The compiled loop around steps without a flush; the reports of its stages are merged once per call.

Between two calls, the pending micro-batches are tensors. They are computed again if the next call has another iterator: that
of another run, whose weights may be those of a checkpoint.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.distribution.clock import time_after
from tfdist.pipelining.execution import ActionClock
from tfdist.pipelining.has_stages import HasStages
from tfdist.step.compiled_loop import FirstTrace, Loop, LoopReport, LoopResult, run_loop, split_numbers
from tfdist.step.delayed_step import DelayedStep, PipelineState


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
