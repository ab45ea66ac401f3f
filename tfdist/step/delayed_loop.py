"""The compiled loop around steps without a flush; what its stages report is merged once per call.

Between two calls, the micro-batches that have begun are tensors. They are computed anew if the next call has another iterator:
that of another run, whose weights may be those of a checkpoint.
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
from tfdist.step.delayed_step import Carried, DelayedStep


class _Ahead(NamedTuple):
    """What is carried from step to step.

    Attributes:
      carried: what the step takes.
      numbers: indices of the examples of the batches that were read ahead, in their order.
    """

    carried: Carried
    numbers: list[tf.Tensor]


class _Progress(NamedTuple):
    """What the loop carries.

    Attributes:
      ahead: what a step takes.
      going: scalar bool; whether all steps of this stage were finite so far.
      squares: scalar; sum of the squared gradients of the latest step, if requested.
      gradient_finite: [variables] bool.
    """

    ahead: _Ahead
    going: tf.Tensor
    squares: tf.Tensor
    gradient_finite: tf.Tensor


@dataclasses.dataclass
class _Held:
    """What is kept between calls."""

    iterator: Any = None
    step: int = -1
    ahead: _Ahead | None = None


def compile_delayed_loop(step: DelayedStep, strategy: HasStages, end: Callable[[], int]) -> Loop:
    """Returns a function as `compile_loop` does; `end` returns the step at which the run ends: no later batch is read."""
    held, first = _Held(), FirstTrace(strategy)

    @tf.function(autograph=False, reduce_retracing=True)
    def begin(iterator: Iterator[Any], first_step: tf.Tensor, last: tf.Tensor) -> _Ahead:
        batches: list[Any] = []
        numbers: list[tf.Tensor] = []
        for place in range(step.read_ahead):
            latest = (batches[-1], numbers[-1]) if batches else None
            batch, of_examples = _read(iterator, strategy, first_step + place < last, latest)
            batches.append(batch)
            numbers.append(of_examples)
        with first.of("begin"):
            return _Ahead(strategy.run(step.begin, first_step, batches), numbers)

    @tf.function(autograph=False, reduce_retracing=True)
    def run(
        iterator: Iterator[Any],
        first_step: tf.Tensor,
        steps: tf.Tensor,
        with_norm: tf.Tensor,
        last: tf.Tensor,
        ahead: _Ahead,
    ) -> tuple[_Ahead, LoopResult]:
        def one(done: tf.Tensor, so_far: _Progress) -> tuple[_Progress, LoopReport]:
            number, ahead = first_step + tf.cast(done, tf.int64), so_far.ahead
            started = tf.timestamp()
            latest = (ahead.carried.latest[0], ahead.numbers[-1]) if step.read_ahead else None
            with tf.control_dependencies([started]):
                batch, numbers = _read(iterator, strategy, number + step.read_ahead < last, latest)
            waited = time_after(batch) - started
            wanted = tf.logical_and(with_norm, tf.equal(done, steps - 1))
            with first.of("advance"):
                carried, made = strategy.run(step.advance, ahead.carried, batch, number, wanted, so_far.going)
            own, *others = [*ahead.numbers, numbers]
            report = tf.stack([tf.cast(x, tf.float64) for x in (made.share, made.finite)])
            gradient_finite = tf.where(so_far.going, made.gradient_finite, so_far.gradient_finite)
            ahead = _of_shapes(_Ahead(carried, others), ahead)
            progress = _Progress(ahead, made.finite, made.squares, gradient_finite)
            return progress, LoopReport([report], waited, tf.zeros([1], tf.float64), own)

        nothing, all_finite = tf.zeros([], keras.config.floatx()), tf.ones([len(step.variables)], tf.bool)
        start = _Progress(ahead, tf.constant(True), nothing, all_finite)
        end, report = run_loop(one, start, steps, [tf.TensorSpec([2], tf.float64)], strategy)
        return end.ahead, _merged(end, report, strategy)

    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        last = tf.constant(end(), tf.int64)
        if held.iterator is not iterator or held.step != int(first_step):
            held.ahead = begin(iterator, first_step, last)
        ahead, result = run(iterator, first_step, steps, with_norm, last, held.ahead)
        held.iterator, held.step, held.ahead = iterator, int(first_step) + int(steps), ahead
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
        never = number < 0

        def body(done: tf.Tensor, before: Carried, found: tf.TensorArray) -> tuple[tf.Tensor, Carried, tf.TensorArray]:
            carried, _ = strategy.run(step.advance, before, batch, number, never, never)
            return done + 1, _of_shapes(carried, before), found.write(done, clock.read())

        carried = strategy.run(step.begin, number, [batch] * step.read_ahead)
        found = tf.TensorArray(tf.float64, size=count, element_shape=[None, 2])
        start = (tf.constant(0), carried, found)
        _, _, found = tf.while_loop(lambda done, *_: done < count, body, start, parallel_iterations=1)
        return found.concat()

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
    found = tf.cond(is_needed, lambda: split_numbers(next(iterator), strategy), lambda: latest)
    return _of_shapes(found, latest)


def _of_shapes(found: Any, before: Any) -> Any:
    """Returns the tensors with the static shapes that they have had before."""
    return tf.nest.map_structure(lambda x, y: tf.ensure_shape(x, y.shape), found, before)


def _merged(end: _Progress, report: LoopReport, strategy: HasStages) -> LoopResult:
    """Merges the reports of all stages, in one message.

    Args:
      end: what the last step carries.
      report: of each step, [2] float64: its share of the loss, and whether the stage was updated.
      strategy: the strategy.
    """
    own = tf.concat([report.values[0], [[tf.cast(end.squares, tf.float64), 1.0]]], axis=0)

    def gather() -> tf.Tensor:
        return strategy.pipeline_collectives.all_gather([own], name="stages/reports")[0]

    everyone = tf.reshape(strategy.run(gather), [strategy.grid.stages, -1, 2])
    shares, updated = tf.unstack(everyone, axis=-1)  # each [stages, steps + 1]
    bad = tf.reduce_any(tf.equal(updated[:, :-1], 0), axis=0)
    failed = tf.reduce_any(bad)
    done = tf.where(failed, tf.argmax(tf.cast(bad, tf.int32)) + 1, tf.size(bad, tf.int64))
    losses, floatx = tf.reduce_sum(shares[:, :-1], axis=0), keras.config.floatx()
    return LoopResult(
        losses=tf.cast(losses[:done], floatx),
        counted=tf.logical_not(bad)[:done],
        norm=tf.cast(tf.sqrt(tf.reduce_sum(shares[:, -1])), floatx),
        may_continue=tf.logical_not(failed),
        gradient_finite=end.gradient_finite,
        waited=report.waited,
        busy=report.busy,
        numbers=report.numbers,
        stage_updates=tf.reduce_sum(tf.cast(updated[:, :-1], tf.int32), axis=1),
    )
