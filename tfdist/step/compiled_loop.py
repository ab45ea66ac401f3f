"""The loop around steps: compiled, or on the host for engines that run one step at a time.

A step that is not finite changes neither weights nor optimizer state. Without loss scaling the loop stops there, so
that the right step is reported; with loss scaling it continues, unless too many consecutive steps were skipped.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.row_partition import IndexedBatch
from tfdist.distribution.clock import time_after
from tfdist.distribution.strategy import Strategy
from tfdist.errors import NotFiniteError
from tfdist.step.metrics import ModelMetrics, drain
from tfdist.step.reduction import run_if
from tfdist.step.step import Step


class FirstTrace:
    """The first trace of the parts of a step, so that no process runs one for which another will not arrive."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._done: set[str] = set()

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Context of a trace, which raises everywhere if it raises somewhere; does nothing if the part was traced before."""
        with contextlib.nullcontext() if part in self._done else self._strategy.raise_on_all_members(f"step/{part}"):
            yield
        self._done.add(part)


class LoopResult(NamedTuple):
    """The result of one call of the loop.

    Attributes:
      losses: [steps done], the global loss of each step.
      counted: [steps done] bool, whether each step was finite and so updated the weights.
      norm: scalar; global gradient norm of the last step.
      may_continue: scalar bool; False if the run must end here.
      gradient_finite: [variables] bool, whether each variable's gradient was finite at the last step; empty if that is not
        known.
      waited: scalar float64; seconds that this process waited for data.
      busy: [local replicas] float64; seconds that each replica needed to compute its own gradients.
      numbers: [rows] int64; indices of the examples of this process's replicas, step by step; empty if the iterator
        does not provide them.
      skipped: [replicas] int32; number of steps that each replica has skipped while others have not; empty if replicas
        can only skip a step together.
      sizes: [steps done] int32, how many of `numbers` belong to each step; empty if all steps have equally many.
      stage_updates: [stages] int32, how often each stage of a pipeline was updated; empty if all are updated together.
      sums: the result of `drain`, if the call has drained the metrics.
    """

    losses: tf.Tensor
    counted: tf.Tensor
    norm: tf.Tensor
    may_continue: tf.Tensor
    gradient_finite: tf.Tensor | tuple[()]
    waited: tf.Tensor
    busy: tf.Tensor
    numbers: tf.Tensor
    skipped: tf.Tensor | tuple[()] = ()
    sizes: tf.Tensor | tuple[()] = ()
    stage_updates: tf.Tensor | tuple[()] = ()
    sums: Sequence[tf.Tensor] = ()

    def used(self, first_step: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yields (first step, number of steps, indices of their examples), such that steps have equally many."""
        numbers = self.numbers.numpy()
        sizes = np.asarray(self.sizes, np.int32)
        if not len(sizes):
            yield first_step, len(self.losses), numbers
            return
        for i, part in enumerate(np.split(numbers, np.cumsum(sizes)[:-1])):
            yield first_step + i, 1, part


class _StepResult(NamedTuple):
    """The result of one step; see `LoopResult`."""

    loss: tf.Tensor
    counted: tf.Tensor
    norm: tf.Tensor
    may_continue: tf.Tensor
    gradient_finite: tf.Tensor
    arrived: tf.Tensor
    busy: tf.Tensor


class LoopReport(NamedTuple):
    """The report of one step of a loop, or of all steps.

    Attributes:
      values: tensors; stacked over the steps.
      waited: scalar float64; seconds that this process waited for data; the sum.
      busy: [local replicas] float64; seconds of computation; the sum.
      numbers: indices of the examples of this process's replicas; concatenated.
    """

    values: Sequence[Any]
    waited: Any
    busy: Any
    numbers: Any


Loop = Callable[[Iterator[Any], tf.Tensor, tf.Tensor, tf.Tensor], LoopResult]
MakeLoop = Callable[[Step, Strategy], Loop]


def compile_loop(step: Step, strategy: Strategy) -> Loop:
    """Returns a function (iterator, first_step int64, steps int32, with_norm bool) -> LoopResult, traced once.

    `with_norm` requests the gradient norm at the last step of the call.
    """
    return _compiled(step, strategy) if strategy.compiles_loops else loop_on_the_host(step, strategy)


def compile_one_step(metrics: ModelMetrics, step: Step, strategy: Strategy) -> Loop:
    """Same as `compile_loop`, for calls of one step after which the metrics are read: one function, without a loop."""
    if not strategy.compiles_loops:
        return loop_on_the_host(step, strategy)
    first = FirstTrace(strategy)

    @tf.function(autograph=False, reduce_retracing=True)
    def one(iterator: Iterator[Any], number: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        started, batch, numbers = timed_batch(iterator, strategy)
        result = _run_step(step, strategy, first, batch, number, with_norm)
        waited = _arrival_time(result, batch, strategy) - started
        last = result.norm, result.may_continue, result.gradient_finite
        sums = drain(metrics, strategy)
        return LoopResult(result.loss[None], result.counted[None], *last, waited, result.busy, numbers, sums=sums)

    return lambda iterator, first_step, steps, with_norm: one(iterator, first_step, with_norm)


def not_finite(
    step: int,
    loss: float,
    result: LoopResult,
    variables: Sequence[keras.Variable],
    scale: float | None,
    locations: Sequence[str] = (),
) -> NotFiniteError:
    """Returns the error to raise when a run cannot continue.

    Args:
      step: step that was not finite.
      loss: its loss.
      result: result of the call of the loop that ended with it.
      variables: trainable variables.
      scale: loss scale; None without loss scaling.
      locations: where the data that was checked has NaN or inf.
    """
    of_data = (
        f"The data has NaN or inf in {' and in '.join(locations)}: remove or replace these values." if locations else ""
    )
    if scale is not None:
        return NotFiniteError(
            "The limit of consecutive skipped steps (--max_skipped_steps) was reached, because gradients were not "
            f"finite: the last is step {step}, with a loss of {loss:g} and the loss scale at {scale:g}. The weights "
            f"are those of the last good step. {of_data or 'Try a lower --learning_rate, or --precision=mixed_bfloat16.'}"
        )
    are_finite = np.asarray(result.gradient_finite, bool)
    bad = [v.path for v, is_finite in zip(variables, are_finite, strict=False) if not is_finite]
    where = f" The first variable whose gradient is not finite: {bad[0]}." if bad else ""
    remedy = of_data or f"Look for inf and NaN in the data{', or try a lower --learning_rate' if step else ''}."
    return NotFiniteError(f"The loss is {loss:g} at step {step}.{where} {_describe_weights(step, result)} {remedy}")


def _describe_weights(step: int, result: LoopResult) -> str:
    """Returns a sentence about the weights after a step that was not finite."""
    updates = np.asarray(result.stage_updates, np.int64)
    counts = np.unique(updates)
    if len(counts) < 2:
        return "The weights are those before that step."
    before = step - (len(result.losses) - 1) + counts
    stages = [_stage_names(np.flatnonzero(updates == count)) for count in counts]
    weights = ", ".join(f"those of {names} before step {number}" for names, number in zip(stages, before, strict=True))
    return (
        f"Loss or gradients of {stages[0]} are not finite, and without a flush, others are updated before that is known: the "
        f"weights are {weights}. Resume from a checkpoint."
    )


def _stage_names(stages: np.ndarray) -> str:
    """Returns for example `stages 0 and 2`."""
    *first, last = map(str, stages)
    return f"stages {', '.join(first)} and {last}" if first else f"stage {last}"


def _compiled(step: Step, strategy: Strategy) -> Loop:
    dtype, first = keras.config.floatx(), FirstTrace(strategy)

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        def one(done: tf.Tensor, _: Any) -> tuple[Any, LoopReport]:
            started, batch, numbers = timed_batch(iterator, strategy)
            needs_norm = tf.logical_and(with_norm, tf.equal(done, steps - 1))
            result = _run_step(step, strategy, first, batch, first_step + tf.cast(done, tf.int64), needs_norm)
            waited = _arrival_time(result, batch, strategy) - started
            last = result.norm, result.may_continue, result.gradient_finite
            return last, LoopReport([result.loss, result.counted], waited, result.busy, numbers)

        start = tf.zeros([], dtype), tf.constant(True), tf.ones([len(step.variables)], tf.bool)
        specs = [tf.TensorSpec([], dtype), tf.TensorSpec([], tf.bool)]
        (norm, may_continue, finite), report = run_loop(
            one, start, steps, specs, strategy, continues=lambda last: last[1]
        )
        losses, counted = report.values
        return LoopResult(losses, counted, norm, may_continue, finite, *report[1:])

    return loop


def loop_on_the_host(step: Step, strategy: Strategy) -> Loop:
    """Same as `compile_loop`, for engines that run one step at a time and for Python iterators.

    The host launches all steps of a call and waits at the end; each step gets from the previous one whether it may be
    applied.
    """
    first = FirstTrace(strategy)

    def numbered(batch: Any, number: tf.Tensor, *args: Any) -> _StepResult:
        return _run_step(step, strategy, first, batch, tf.cast(number, tf.int64), *args)

    one = strategy.compiled(numbered)

    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        results: list[_StepResult] = []
        numbers: list[tf.Tensor] = []
        waited, may_apply = 0.0, tf.constant(True)
        for done in range(int(steps)):
            started = time.perf_counter()
            batch, own = split_numbers(next(iterator), strategy)
            numbers.append(own)
            waited += time.perf_counter() - started
            needs_norm = tf.constant(bool(with_norm) and done == int(steps) - 1)
            # DTensor treats a small int64 as a compile-time constant, and recompiles the program whenever it changes.
            number = tf.cast(first_step + done, tf.uint64)
            results.append(one(batch, number, needs_norm, may_apply))
            may_apply = results[-1].may_continue
        ended = [not local_value(each.may_continue) for each in results]
        results = results[: ended.index(True) + 1] if True in ended else results
        last = results[-1]
        return LoopResult(
            tf.stack([local_value(each.loss) for each in results]),
            tf.stack([local_value(each.counted) for each in results]),
            local_value(last.norm),
            local_value(last.may_continue),
            local_value(last.gradient_finite),
            np.float64(waited),
            local_value(last.busy),
            tf.concat(numbers[: len(results)], 0),
        )

    def local_value(value: tf.Tensor) -> tf.Tensor:
        return strategy.local(value)[0]

    return loop


def _run_step(
    step: Step,
    strategy: Strategy,
    first: FirstTrace,
    batch: Any,
    number: tf.Tensor,
    with_norm: tf.Tensor,
    may_apply: tf.Tensor | None = None,
) -> _StepResult:
    """Runs one step, inside a compiled function; if `may_apply` is False, it changes nothing."""
    with first.of("compute"):
        computed = strategy.run(step.compute, batch, number, with_norm)
    if may_apply is not None:
        computed = strategy.run(step.gated, computed, may_apply)
    loss, norm = (tf.cast(strategy.local(x)[0], keras.config.floatx()) for x in (computed.loss, computed.norm))
    finite = strategy.local(computed.finite)[0]
    with first.of("plan"):
        unused = step.unused()

    updated = [variable for i, variable in enumerate(step.variables) if i not in unused]
    gradient_finite = run_if(
        finite,
        lambda: strategy.run(lambda result: step.apply(result, unused), computed),
        lambda: strategy.run(step.skip, computed),
        [strategy.local(gradient)[0] for gradient in computed.gradients],
    )
    # Not in the condition, whose graph differs between replicas that update different weights, and with it names of calls.
    with tf.control_dependencies([gradient_finite]):
        strategy.run(lambda: strategy.optimizer_shards.exchange(updated))
    may_continue = step.may_continue(finite, [strategy.local(value)[0] for value in computed.scale[-1:]])
    return _StepResult(
        loss,
        finite,
        norm,
        may_continue=may_continue if may_apply is None else tf.logical_and(may_apply, may_continue),
        gradient_finite=gradient_finite,
        arrived=strategy.local(computed.arrived)[0],
        busy=tf.stack(strategy.local(computed.busy)),
    )


def run_loop(
    step: Callable[[tf.Tensor, Any], tuple[Any, LoopReport]],
    start: Any,
    steps: tf.Tensor | int,
    specs: Sequence[tf.TensorSpec],
    strategy: Strategy,
    continues: Callable[[Any], tf.Tensor] | None = None,
) -> tuple[Any, LoopReport]:
    """Runs steps one after the other, in a compiled function; returns the last state, and all reports as one.

    Args:
      step: function (number of steps done, state) -> (state, report).
      start: the initial state.
      steps: maximum number of steps.
      specs: shapes and dtypes of the values that a step reports.
      strategy: strategy on which they run.
      continues: returns whether another step follows, given the state; None if it always does.
    """

    def body(done: tf.Tensor, state: Any, reports: LoopReport) -> tuple[tf.Tensor, Any, LoopReport]:
        state, report = step(done, state)
        arrays = [array.write(done, value) for array, value in zip(reports.values, report.values, strict=True)]
        waited, busy = reports.waited + report.waited, reports.busy + report.busy
        return done + 1, state, LoopReport(arrays, waited, busy, reports.numbers.write(done, report.numbers))

    def condition(done: tf.Tensor, state: Any, _: LoopReport) -> tf.Tensor:
        return tf.logical_and(done < steps, continues(state)) if continues else done < steps

    empty = LoopReport(
        [tf.TensorArray(spec.dtype, size=0, dynamic_size=True, element_shape=spec.shape) for spec in specs],
        tf.zeros([], tf.float64),
        tf.zeros([len(strategy.local_replicas)], tf.float64),
        tf.TensorArray(tf.int64, size=0, dynamic_size=True, infer_shape=False, element_shape=[None]),
    )
    _, state, end = tf.while_loop(condition, body, (tf.constant(0), start, empty), parallel_iterations=1)
    stacked = [array.stack() for array in end.values]
    return state, LoopReport(stacked, end.waited, end.busy, end.numbers.concat())


def timed_batch(iterator: Iterator[Any], strategy: Strategy) -> tuple[tf.Tensor, Any, tf.Tensor]:
    """Returns when the next batch was requested, and the result of `split_numbers`; in a compiled function."""
    started = tf.timestamp()
    with tf.control_dependencies([started]):
        return started, *split_numbers(next(iterator), strategy)


def _arrival_time(result: _StepResult, batch: Any, strategy: Strategy) -> tf.Tensor:
    """Returns when the batch of a step was available."""
    return time_after(_first_local(strategy, batch)) if strategy.compiles_replicas else result.arrived


def split_numbers(element: Any, strategy: Strategy) -> tuple[Any, tf.Tensor]:
    """Returns the batch and the indices of this process's examples, empty if the iterator does not provide them."""
    if not isinstance(element, IndexedBatch):
        return element, tf.zeros([0], tf.int64)
    return element.batch, tf.concat(strategy.local(element.numbers), 0)


def _first_local(strategy: Strategy, batch: Any) -> list[tf.Tensor]:
    return [strategy.local(part)[0] for part in tf.nest.flatten(batch)]
