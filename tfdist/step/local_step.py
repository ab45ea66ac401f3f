"""The compiled loop of replicas that train locally, between exchanges of their weights."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batches import count_rows
from tfdist.distribution.strategy import State, Strategy
from tfdist.step.compiled_loop import Loop, LoopReport, LoopResult, count_steps, run_loop, timed_batch
from tfdist.step.layer_state import assign
from tfdist.step.reduction import ComputeResult
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step

ROWS = State("exchange/rows", (), tf.float64, per_replica=True)
_STOPPED = State("exchange/stopped", (), tf.bool, per_replica=True)


def compile_local_loop(step: Step, store: StateStore, strategy: Strategy) -> Loop:
    """Returns a loop like that of `compile_loop`, in which each replica trains on its own rows without communication.

    Without loss scaling, a replica's weights stay unchanged after a step whose loss or gradients were not finite.
    """
    local_count = len(strategy.local_replicas)
    counted_rows, stopped = store.variables([ROWS, _STOPPED])

    def train(
        batch: Any, number: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> tuple[ComputeResult, tf.Tensor, tf.Tensor]:
        """Computes and applies one step; also returns its number of rows and whether the run may continue."""
        had_stopped = tf.convert_to_tensor(stopped)
        result = step.compute(batch, number, with_gradient_norm)
        result = step.with_condition(result, tf.logical_not(had_stopped))
        rows = count_rows(batch)
        step.apply_if(result.finite, result, lambda: counted_rows.assign_add(tf.cast(rows, counted_rows.dtype)))
        may_continue = step.may_continue(result.finite, result.scale)
        stopped.assign(tf.logical_not(may_continue))
        return result, rows, may_continue

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(
        iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> LoopResult:
        strategy.run(lambda: assign([stopped], [False]))

        def run_step(index: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, LoopReport]:
            start_time, batch, example_indices = timed_batch(iterator, strategy)
            needs_norm = tf.logical_and(with_gradient_norm, tf.equal(index, steps - 1))
            number = first_step + tf.cast(index, tf.int64)
            result, rows, may_continue = strategy.run(train, batch, number, needs_norm)
            parts = result.loss, rows, result.finite, may_continue
            values = [tf.stack([tf.cast(strategy.local(x)[i], tf.float64) for x in parts]) for i in range(local_count)]
            wait_seconds = strategy.local(result.arrival_time)[0] - start_time
            compute_seconds = tf.stack(strategy.local(result.compute_seconds))
            norm = tf.cast(strategy.local(result.norm)[0], keras.config.floatx())
            return norm, LoopReport([tf.stack(values)], wait_seconds, compute_seconds, example_indices)

        spec = tf.TensorSpec([local_count, 4], tf.float64)
        norm, report = run_loop(run_step, tf.zeros([], keras.config.floatx()), steps, [spec], strategy)
        return _merge_reports(norm, report, strategy)

    return loop


def _merge_reports(norm: tf.Tensor, report: LoopReport, strategy: Strategy) -> LoopResult:
    """Merges the reports of all replicas with one all-reduce.

    `report` has, for each step, [local replicas, 4] float64: loss, number of rows, is finite, may continue.
    """
    losses, rows, is_finite, may_continue = tf.unstack(report.values[0], axis=-1)  # each [steps, local replicas]
    applied_rows = rows * is_finite
    losses = tf.where(is_finite > 0, losses, 0.0)  # the loss of a replica that skips the step may be NaN
    ranks = tf.one_hot(list(strategy.local_replicas), strategy.replicas, dtype=tf.float64)  # [local, replicas]
    sums = tf.reduce_sum(tf.stack([losses * applied_rows, applied_rows]), axis=-1)
    parts = [sums, tf.transpose((1 - is_finite) @ ranks), tf.transpose((1 - may_continue) @ ranks)]
    local_report = tf.concat(parts, 0) / len(strategy.local_replicas)  # [2 + 2 replicas, steps]
    global_report = strategy.run(lambda: strategy.collectives.all_reduce([local_report], name="local_loop/reports")[0])
    global_report = strategy.local(global_report)[0]
    total, applied_rows = global_report[0], global_report[1]
    skipped, stopped = tf.split(global_report[2:], 2, axis=0)
    has_stopped = tf.reduce_any(stopped > 0, axis=0)  # [steps]
    step_count = count_steps(has_stopped)
    is_finite = tf.logical_not(has_stopped | tf.equal(applied_rows, 0))
    mean = tf.where(is_finite, total / applied_rows, tf.constant(float("nan"), tf.float64))
    return LoopResult(
        losses=tf.cast(mean, keras.config.floatx())[:step_count],
        is_finite=is_finite[:step_count],
        norm=norm,
        may_continue=tf.logical_not(tf.reduce_any(has_stopped)),
        gradient_finite=(),
        wait_seconds=report.wait_seconds,
        compute_seconds=report.compute_seconds,
        example_indices=report.example_indices,
        skipped=tf.cast(tf.reduce_sum(skipped[:, :step_count], axis=1), tf.int32),
    )
