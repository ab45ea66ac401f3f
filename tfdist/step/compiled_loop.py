"""The training loop: compiled, or on the host for engines that run one step at a time.

A step whose loss or gradients are not finite changes neither weights nor optimizer state. Without loss scaling, the loop
stops at that step and reports it. With loss scaling, it continues unless too many consecutive steps were skipped.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.row_partition import IndexedBatch
from tfdist.distribution.clock import time_after
from tfdist.distribution.strategy import Strategy
from tfdist.errors import NotFiniteError
from tfdist.step.metrics import ModelMetrics, read_and_reset
from tfdist.step.reduction import run_if
from tfdist.step.step import Step

Tracing = Callable[[str], contextlib.AbstractContextManager[None]]  # context for tracing a named part of a step


def first_trace(strategy: Strategy) -> Tracing:
    """Returns a `Tracing` in which the first trace of a part raises in all processes if it raises in one of them."""
    traced_parts: set[str] = set()

    @contextlib.contextmanager
    def trace(part: str) -> Iterator[None]:
        with contextlib.nullcontext() if part in traced_parts else strategy.raise_on_all_members(f"step/{part}"):
            yield
        traced_parts.add(part)

    return trace


class LoopResult(NamedTuple):
    """The result of one call of the loop."""

    losses: tf.Tensor  # [steps]; the global loss of each step that was run
    is_finite: tf.Tensor  # [steps] bool; whether loss and gradients were finite, so the step updated weights
    norm: tf.Tensor  # scalar; global gradient norm of the last step
    may_continue: tf.Tensor  # scalar bool; False if the run must end here
    # [variables] bool; whether each variable's gradient was finite at the last step; empty if unknown
    gradient_finite: tf.Tensor | tuple[()]
    wait_seconds: tf.Tensor  # scalar float64; seconds that this process waited for data
    compute_seconds: tf.Tensor  # [local replicas] float64; seconds in which each replica computed its local gradients
    # [rows] int64; indices of the examples of this process's replicas, step by step; empty if the iterator does not
    # provide them
    example_indices: tf.Tensor
    # [replicas] int32; number of steps that each replica skipped while others did not; empty if replicas always skip a
    # step together
    skipped: tf.Tensor | tuple[()] = ()
    # [steps] int32; number of indices in `example_indices` for each step; empty if it is the same for all steps
    sizes: tf.Tensor | tuple[()] = ()
    # [stages] int32; number of updates of each pipeline stage; empty if all stages are updated together
    stage_updates: tf.Tensor | tuple[()] = ()
    sums: Sequence[tf.Tensor] = ()  # result of `read_and_reset` if the call reset the metrics, else empty
    # The updates of parameter servers, in order, as JSON; empty unless workers compute whole batches
    updates: Sequence[Mapping[str, Any]] = ()

    def example_ranges(self, first_step: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yields (first step, number of steps, indices of their examples); the steps of a range have equal batch sizes."""
        example_indices = self.example_indices.numpy()
        sizes = np.asarray(self.sizes, np.int32)
        if not len(sizes):
            yield first_step, len(self.losses), example_indices
            return
        for i, part in enumerate(np.split(example_indices, np.cumsum(sizes)[:-1])):
            yield first_step + i, 1, part


class _StepResult(NamedTuple):
    """The result of one step; see `LoopResult`."""

    loss: tf.Tensor
    is_finite: tf.Tensor
    norm: tf.Tensor
    may_continue: tf.Tensor
    gradient_finite: tf.Tensor
    arrival_time: tf.Tensor
    compute_seconds: tf.Tensor


class LoopReport(NamedTuple):
    """The report of one step of a loop, or of all its steps."""

    values: Sequence[Any]  # tensors, stacked over the steps
    wait_seconds: Any  # scalar float64; seconds that this process waited for data, summed over the steps
    compute_seconds: Any  # [local replicas] float64; seconds of computation, summed over the steps
    example_indices: Any  # indices of the examples of this process's replicas, concatenated over the steps


Loop = Callable[[Iterator[Any], tf.Tensor, tf.Tensor, tf.Tensor], LoopResult]
MakeLoop = Callable[[Step, Strategy], Loop]


def compile_loop(step: Step, strategy: Strategy) -> Loop:
    """Returns a function (iterator, first_step int64, steps int32, with_gradient_norm bool) -> LoopResult, traced once.

    `with_gradient_norm` requests the gradient norm at the last step of the call.
    """
    if not strategy.compiles_loops:
        return make_host_loop(step, strategy)
    dtype, trace = keras.config.floatx(), first_trace(strategy)

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(
        iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> LoopResult:
        def run_step(index: tf.Tensor, _: Any) -> tuple[Any, LoopReport]:
            needs_norm = tf.logical_and(with_gradient_norm, tf.equal(index, steps - 1))
            return _next_step(step, strategy, trace, iterator, first_step + tf.cast(index, tf.int64), needs_norm)

        initial_state = tf.zeros([], dtype), tf.constant(True), tf.ones([len(step.variables)], tf.bool)
        specs = [tf.TensorSpec([], dtype), tf.TensorSpec([], tf.bool)]
        end_state, report = run_loop(run_step, initial_state, steps, specs, strategy, continues=lambda last: last[1])
        (losses, is_finite), (norm, may_continue, gradient_finite) = report.values, end_state
        return LoopResult(losses, is_finite, norm, may_continue, gradient_finite, *report[1:])

    return loop


def compile_single_step(metrics: ModelMetrics, step: Step, strategy: Strategy) -> Loop:
    """Returns a `Loop` for calls of one step that also read and reset the metrics: one function without a loop."""
    if not strategy.compiles_loops:
        return make_host_loop(step, strategy)
    trace = first_trace(strategy)

    @tf.function(autograph=False, reduce_retracing=True)
    def run_step(iterator: Iterator[Any], number: tf.Tensor, with_gradient_norm: tf.Tensor) -> LoopResult:
        end_state, report = _next_step(step, strategy, trace, iterator, number, with_gradient_norm)
        loss, is_finite = report.values
        return LoopResult(loss[None], is_finite[None], *end_state, *report[1:], sums=read_and_reset(metrics, strategy))

    return lambda iterator, first_step, steps, with_gradient_norm: run_step(iterator, first_step, with_gradient_norm)


def not_finite_error(
    step: int,
    loss: float,
    result: LoopResult,
    variables: Sequence[keras.Variable],
    scale: float | None,
    locations: Sequence[str] = (),
) -> NotFiniteError:
    """Returns the error to raise when a run cannot continue because a loss or gradient was not finite.

    `result` is the result of the loop that ended with this step, `scale` is the loss scale or None, and `locations` describe
    where the checked data has NaN or inf.
    """
    data_hint = (
        f"The data has NaN or inf in {' and in '.join(locations)}: remove or replace these values." if locations else ""
    )
    if scale is not None:
        return NotFiniteError(
            "The limit of consecutive skipped steps (--max_skipped_steps) was reached, because gradients were not "
            f"finite. The last is step {step}, with a loss of {loss:g} and a loss scale of {scale:g}. The weights are "
            f"those of the last finite step. {data_hint or 'Try a lower --learning_rate, or --precision=mixed_bfloat16.'}"
        )
    are_finite = np.asarray(result.gradient_finite, bool)
    variable_paths = [v.path for v, is_finite in zip(variables, are_finite, strict=False) if not is_finite]
    variable_hint = f" The first variable whose gradient is not finite: {variable_paths[0]}." if variable_paths else ""
    remedy = data_hint or f"Look for inf and NaN in the data{', or try a lower --learning_rate' if step else ''}."
    return NotFiniteError(
        f"The loss is {loss:g} at step {step}.{variable_hint} {_describe_weights(step, result)} {remedy}"
    )


def _describe_weights(step: int, result: LoopResult) -> str:
    updates = np.asarray(result.stage_updates, np.int64)
    counts = np.unique(updates)
    if len(counts) < 2:
        return "The weights are those before that step."
    update_steps = step - (len(result.losses) - 1) + counts
    stages = [" and ".join(f"stage {stage}" for stage in np.flatnonzero(updates == count)) for count in counts]
    weights = ", ".join(
        f"those of {names} before step {number}" for names, number in zip(stages, update_steps, strict=True)
    )
    return (
        f"The loss or the gradients of {stages[0]} are not finite. Without a flush, other stages are updated before this is "
        f"known: the weights are {weights}. Resume from a checkpoint."
    )


def make_host_loop(step: Step, strategy: Strategy) -> Loop:
    """Returns a `Loop` for engines that run one step at a time, and for Python iterators.

    The host launches all steps of a call and waits at the end. Each step receives from the previous one whether it may
    be applied.
    """
    trace = first_trace(strategy)
    run_step = strategy.compiled(
        lambda batch, number, *args: _run_step(step, strategy, trace, batch, tf.cast(number, tf.int64), *args)
    )

    def loop(
        iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> LoopResult:
        results: list[_StepResult] = []
        example_indices: list[tf.Tensor] = []
        wait_seconds, may_apply = 0.0, tf.constant(True)
        for index in range(int(steps)):
            start_time = time.perf_counter()
            batch, local_indices = split_example_indices(next(iterator), strategy)
            example_indices.append(local_indices)
            wait_seconds += time.perf_counter() - start_time
            needs_norm = tf.constant(bool(with_gradient_norm) and index == int(steps) - 1)
            # DTensor treats a small int64 as a compile-time constant, and recompiles the program whenever it changes.
            number = tf.cast(first_step + index, tf.uint64)
            results.append(run_step(batch, number, needs_norm, may_apply))
            may_apply = results[-1].may_continue
        local_results = [_StepResult(*(strategy.local(value)[0] for value in result)) for result in results]
        is_end = [not result.may_continue for result in local_results]
        local_results = local_results[: is_end.index(True) + 1] if True in is_end else local_results
        losses, is_finite = (tf.stack([result[i] for result in local_results]) for i in (0, 1))
        _, _, norm, may_continue, gradient_finite, _, compute_seconds = local_results[-1]
        times = np.float64(wait_seconds), compute_seconds
        all_indices = tf.concat(example_indices[: len(local_results)], 0)
        return LoopResult(losses, is_finite, norm, may_continue, gradient_finite, *times, all_indices)

    return loop


def _next_step(
    step: Step,
    strategy: Strategy,
    trace: Tracing,
    iterator: Iterator[Any],
    number: tf.Tensor,
    with_gradient_norm: tf.Tensor,
) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], LoopReport]:
    """Runs the step of the next batch, inside a compiled function.

    Returns (norm, whether the run may continue, whether each gradient was finite), and a report of the loss and `is_finite`.
    """
    start_time, batch, example_indices = timed_batch(iterator, strategy)
    result = _run_step(step, strategy, trace, batch, number, with_gradient_norm)
    arrival_time = result.arrival_time
    if strategy.compiles_replicas:
        arrival_time = time_after([strategy.local(part)[0] for part in tf.nest.flatten(batch)])
    report = LoopReport(
        [result.loss, result.is_finite], arrival_time - start_time, result.compute_seconds, example_indices
    )
    return (result.norm, result.may_continue, result.gradient_finite), report


def _run_step(
    step: Step,
    strategy: Strategy,
    trace: Tracing,
    batch: Any,
    number: tf.Tensor,
    with_gradient_norm: tf.Tensor,
    may_apply: tf.Tensor | None = None,
) -> _StepResult:
    """Runs one step inside a compiled function; if `may_apply` is False, the step changes nothing."""
    with trace("compute"):
        replica_result = strategy.run(step.compute, batch, number, with_gradient_norm)
    if may_apply is not None:
        replica_result = strategy.run(step.with_condition, replica_result, may_apply)
    loss, norm, finite = (
        strategy.local(x)[0] for x in (replica_result.loss, replica_result.norm, replica_result.finite)
    )
    with trace("plan"):
        unused_indices = step.unused_variables()

    updated_variables = [variable for i, variable in enumerate(step.variables) if i not in unused_indices]
    gradient_finite = run_if(
        finite,
        lambda: strategy.run(lambda result: step.apply(result, unused_indices), replica_result),
        lambda: strategy.run(step.skip, replica_result),
        [strategy.local(gradient)[0] for gradient in replica_result.gradients],
    )
    # Not inside the condition, whose graph and thus the names of calls differ between replicas that update different weights.
    with tf.control_dependencies([gradient_finite]):
        strategy.run(lambda: strategy.optimizer_shards.exchange(updated_variables))
    may_continue = step.may_continue(finite, [strategy.local(value)[0] for value in replica_result.scale[-1:]])
    return _StepResult(
        tf.cast(loss, keras.config.floatx()),
        finite,
        tf.cast(norm, keras.config.floatx()),
        may_continue=may_continue if may_apply is None else tf.logical_and(may_apply, may_continue),
        gradient_finite=gradient_finite,
        arrival_time=strategy.local(replica_result.arrival_time)[0],
        compute_seconds=tf.stack(strategy.local(replica_result.compute_seconds)),
    )


def run_loop(
    step: Callable[[tf.Tensor, Any], tuple[Any, LoopReport]],
    initial_state: Any,
    steps: tf.Tensor | int,
    specs: Sequence[tf.TensorSpec],
    strategy: Strategy,
    continues: Callable[[Any], tf.Tensor] | None = None,
) -> tuple[Any, LoopReport]:
    """Runs steps sequentially in a compiled function; returns the last state and the merged report.

    `step` is a function (number of completed steps, state) -> (state, report). At most `steps` steps are run, as long as
    `continues(state)`, a scalar bool, is True. `specs` are the shapes and dtypes of the values that a step reports.
    """

    def body(index: tf.Tensor, state: Any, reports: LoopReport) -> tuple[tf.Tensor, Any, LoopReport]:
        state, report = step(index, state)
        arrays = [array.write(index, value) for array, value in zip(reports.values, report.values, strict=True)]
        wait_seconds = reports.wait_seconds + report.wait_seconds
        compute_seconds = reports.compute_seconds + report.compute_seconds
        example_indices = reports.example_indices.write(index, report.example_indices)
        return index + 1, state, LoopReport(arrays, wait_seconds, compute_seconds, example_indices)

    def condition(index: tf.Tensor, state: Any, _: LoopReport) -> tf.Tensor:
        return tf.logical_and(index < steps, continues(state)) if continues else index < steps

    empty = LoopReport(
        [tf.TensorArray(spec.dtype, size=0, dynamic_size=True, element_shape=spec.shape) for spec in specs],
        tf.zeros([], tf.float64),
        tf.zeros([len(strategy.local_replicas)], tf.float64),
        tf.TensorArray(tf.int64, size=0, dynamic_size=True, infer_shape=False, element_shape=[None]),
    )
    _, state, final = tf.while_loop(condition, body, (tf.constant(0), initial_state, empty), parallel_iterations=1)
    values = [array.stack() for array in final.values]
    return state, LoopReport(values, final.wait_seconds, final.compute_seconds, final.example_indices.concat())


def count_steps(is_end: tf.Tensor) -> tf.Tensor:
    """Returns the number of steps up to and including the first True in a [steps] bool; all steps if there is none."""
    return tf.where(tf.reduce_any(is_end), tf.argmax(tf.cast(is_end, tf.int32)) + 1, tf.size(is_end, tf.int64))


def timed_batch(iterator: Iterator[Any], strategy: Strategy) -> tuple[tf.Tensor, Any, tf.Tensor]:
    """Returns the time of the request for the next batch, and the result of `split_example_indices`. For compiled functions."""
    start_time = tf.timestamp()
    with tf.control_dependencies([start_time]):
        return start_time, *split_example_indices(next(iterator), strategy)


def split_example_indices(element: Any, strategy: Strategy) -> tuple[Any, tf.Tensor]:
    """Returns the batch and the indices of this process's examples, empty if the iterator does not provide them."""
    if not isinstance(element, IndexedBatch):
        return element, tf.zeros([0], tf.int64)
    return element.batch, tf.concat(strategy.local(element.indices), 0)
