"""A step of replicas that train locally, between exchanges of their weights, and its compiled loop."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batches import count_rows
from tfdist.distribution.strategy import State, Strategy
from tfdist.gradients import Sum
from tfdist.step.compiled_loop import Loop, LoopReport, LoopResult, run_loop, timed_batch
from tfdist.step.gradient_source import GradientSource
from tfdist.step.reduction import Computed, run_if
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step

ROWS = State("exchange/rows", (), tf.float64, per_replica=True)
_STOPPED = State("exchange/stopped", (), tf.bool, per_replica=True)


class LocalResult(NamedTuple):
    """The result of a step, on each replica.

    Attributes:
      computed: result of `compute`.
      rows: scalar int32; number of rows.
      may_continue: scalar bool; False if the run must end.
    """

    computed: Computed
    rows: tf.Tensor
    may_continue: tf.Tensor


class LocalStep(Step):
    """A step on a replica's own rows and weights: its loss is the rows' mean, and its updates change no other replica."""

    def _apply_if(self, condition: tf.Tensor, computed: Computed, count: Callable[[], Any]) -> None:
        """Applies and counts a step, or skips it. A replica function, without communication."""
        unused = self.unused()

        def apply() -> None:
            self.apply(computed, unused)
            count()

        run_if(condition, apply, lambda: self.skip(computed))

    def _apply_gradients(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        """See base class."""
        self._strategy.apply_locally(self.optimizer, gradients, variables)


class LocalSGDStep(LocalStep):
    """A step of one model on each replica's own rows and weights."""

    def __init__(self, source: GradientSource, store: StateStore):
        """Initializes the step and creates its state.

        Args:
          source: local gradients.
          store: store of the state.
        """
        super().__init__(source, Sum(), store)
        self._rows, self._stopped = store.variables([ROWS, _STOPPED])

    def begin(self) -> None:
        """Starts a call of the loop. A replica function."""
        self._stopped.assign(False)

    def train(self, batch: Any, step: tf.Tensor, with_norm: tf.Tensor) -> LocalResult:
        """Computes and applies one step. A replica function, without communication.

        After a step that was not finite, without loss scaling, the replica's weights stay as they were before it.

        Args:
          batch: this replica's rows.
          step: scalar int64; number of steps done so far.
          with_norm: scalar bool; whether to compute the norm of the gradients.
        """
        stopped = tf.convert_to_tensor(self._stopped)
        computed = self.compute(batch, step, with_norm)
        computed = self.gated(computed, tf.logical_not(stopped))
        rows = count_rows(batch)
        self._apply_if(computed.finite, computed, lambda: self._rows.assign_add(tf.cast(rows, self._rows.dtype)))
        may_continue = self.may_continue(computed.finite, computed.scale)
        self._stopped.assign(tf.logical_not(may_continue))
        return LocalResult(computed, rows, may_continue)


def compile_local_loop(step: LocalSGDStep, strategy: Strategy) -> Loop:
    """Returns a function as `compile_loop` does; each replica takes its steps on its own rows, without communication."""
    local_count = len(strategy.local_replicas)

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        strategy.run(step.begin)

        def one(done: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, LoopReport]:
            started, batch, numbers = timed_batch(iterator, strategy)
            last_with_norm = tf.logical_and(with_norm, tf.equal(done, steps - 1))
            results = strategy.run(step.train, batch, first_step + tf.cast(done, tf.int64), last_with_norm)
            computed = results.computed
            parts = computed.loss, results.rows, computed.finite, results.may_continue
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
