"""The compiled loop of replicas that train locally, between exchanges of their weights."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batches import count_rows
from tfdist.distribution.strategy import State, Strategy
from tfdist.step.compiled_loop import Loop, LoopReport, LoopResult, run_loop, timed_batch
from tfdist.step.reduction import Computed
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step

ROWS = State("exchange/rows", (), tf.float64, per_replica=True)
_STOPPED = State("exchange/stopped", (), tf.bool, per_replica=True)


def compile_local_loop(step: Step, store: StateStore, strategy: Strategy) -> Loop:
    """Returns a function as `compile_loop` does; each replica takes its steps on its own rows, without communication.

    After a step that was not finite, without loss scaling, the replica's weights stay as they were before it.
    """
    local_count = len(strategy.local_replicas)
    counted_rows, stopped = store.variables([ROWS, _STOPPED])

    def begin() -> None:
        stopped.assign(False)

    def train(batch: Any, number: tf.Tensor, with_norm: tf.Tensor) -> tuple[Computed, tf.Tensor, tf.Tensor]:
        """Computes and applies one step; returns also its number of rows, and whether the run may continue."""
        was_stopped = tf.convert_to_tensor(stopped)
        computed = step.compute(batch, number, with_norm)
        computed = step.gated(computed, tf.logical_not(was_stopped))
        rows = count_rows(batch)
        step.apply_if(computed.finite, computed, lambda: counted_rows.assign_add(tf.cast(rows, counted_rows.dtype)))
        may_continue = step.may_continue(computed.finite, computed.scale)
        stopped.assign(tf.logical_not(may_continue))
        return computed, rows, may_continue

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        strategy.run(begin)

        def one(done: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, LoopReport]:
            started, batch, numbers = timed_batch(iterator, strategy)
            last_with_norm = tf.logical_and(with_norm, tf.equal(done, steps - 1))
            number = first_step + tf.cast(done, tf.int64)
            computed, rows, may_continue = strategy.run(train, batch, number, last_with_norm)
            parts = computed.loss, rows, computed.finite, may_continue
            values = [tf.stack([tf.cast(strategy.local(x)[i], tf.float64) for x in parts]) for i in range(local_count)]
            waited, busy = strategy.local(computed.arrived)[0] - started, tf.stack(strategy.local(computed.busy))
            norm = tf.cast(strategy.local(computed.norm)[0], keras.config.floatx())
            return norm, LoopReport([tf.stack(values)], waited, busy, numbers)

        spec = tf.TensorSpec([local_count, 4], tf.float64)
        norm, report = run_loop(one, tf.zeros([], keras.config.floatx()), steps, [spec], strategy)
        return _merge_reports(norm, report, strategy)

    return loop


def _merge_reports(norm: tf.Tensor, report: LoopReport, strategy: Strategy) -> LoopResult:
    """Merges the reports of all replicas, in one message.

    Args:
      norm: scalar; norm of the gradients of this process's first replica.
      report: of each step, [local replicas, 4] float64: loss and rows, and which replicas were finite and may continue.
      strategy: strategy of the replicas.
    """
    losses, rows, finite, may_continue = tf.unstack(report.values[0], axis=-1)  # each [steps, local replicas]
    counted = rows * finite
    losses = tf.where(finite > 0, losses, 0.0)  # the loss of a replica that skips may be NaN
    ranks = tf.one_hot(list(strategy.local_replicas), strategy.replicas, dtype=tf.float64)  # [local, replicas]
    sums = tf.reduce_sum(tf.stack([losses * counted, counted]), axis=-1)
    parts = [sums, tf.transpose((1 - finite) @ ranks), tf.transpose((1 - may_continue) @ ranks)]
    local_report = tf.concat(parts, 0) / len(strategy.local_replicas)  # [2 + 2 replicas, steps]
    merged = strategy.run(lambda: strategy.collectives.all_reduce([local_report], name="local_loop/reports")[0])
    replicas = strategy.replicas
    total, counted, skipped, stopped = tf.split(strategy.local(merged)[0], [1, 1, replicas, replicas], axis=0)
    total, counted = total[0], counted[0]
    has_stopped = tf.reduce_any(stopped > 0, axis=0)  # [steps]
    done = tf.where(
        tf.reduce_any(has_stopped), tf.argmax(tf.cast(has_stopped, tf.int32)) + 1, tf.size(has_stopped, tf.int64)
    )
    mean = tf.where(has_stopped | tf.equal(counted, 0), tf.constant(float("nan"), tf.float64), total / counted)
    return LoopResult(
        losses=tf.cast(mean, keras.config.floatx())[:done],
        counted=tf.logical_not(has_stopped | tf.equal(counted, 0))[:done],
        norm=norm,
        may_continue=tf.logical_not(tf.reduce_any(has_stopped)),
        gradient_finite=(),
        waited=report.waited,
        busy=report.busy,
        numbers=report.numbers,
        skipped=tf.cast(tf.reduce_sum(skipped[:, :done], axis=1), tf.int32),
    )
