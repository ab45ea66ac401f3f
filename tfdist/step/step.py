"""`Step`, a training step as two replica functions.

`compute` computes reduced gradients and the global loss; `apply` updates weights and optimizer state. A loss or gradient
that is not finite changes neither. Collectives and updates are never inside a condition within a replica function, where
tf.distribute does not allow them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RecordedCall, RecordingCollectives, collectives_scope
from tfdist.collectives.rows import mask_if_empty
from tfdist.collectives.trace_check import TRACING_SECONDS, agree_on_plan
from tfdist.data.batches import count_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution import clock
from tfdist.gradients import Reducer, ReductionResult
from tfdist.step import randomness
from tfdist.step.gradient_source import GradientSource
from tfdist.step.layer_state import SideEffects, assign, replica_means
from tfdist.step.reduction import ComputeResult, Reduction, run_if
from tfdist.step.settings import named_specs
from tfdist.step.state_store import StateStore
from tfdist.step.validation import inner_optimizer

_log = logging.getLogger(__name__)


class Step:
    """A step of one model: computes gradients with a source, reduces them, and updates the model, in replica functions."""

    def __init__(self, source: GradientSource, reducer: Reducer, store: StateStore):
        self.source, self.settings, self.variables = source, source.settings, source.variables
        self._strategy = source.strategy
        self.optimizer = inner_optimizer(source.model.optimizer)
        self._unused: frozenset[int] | None = None
        self._reduction = Reduction(reducer, named_specs(self.variables, "loss"), store)
        self.reducer_state = self._reduction.variables
        self._scale = source.scale
        self.side_effects = SideEffects(source.model, self._strategy, self.settings, source.metrics.variables)
        self._recording = RecordingCollectives(source.collectives)
        self.gradient_calls: RecordingCollectives | None = None  # calls that sum gradients in the latest trace
        self.sends_rows = False  # whether the forward pass sends rows, whose number may change from step to step

    def compute(self, batch: Any, step: tf.Tensor, with_gradient_norm: tf.Tensor) -> ComputeResult:
        """Runs the forward pass, the backward pass and the reduction. A replica function.

        `batch` has this replica's rows, at least one: (x, y) or (x, y, sample_weight), or a `ReplicaRows` of these. `step`, a
        scalar int64, is the number of previous updates. `with_gradient_norm`, a scalar bool, requests the global gradient norm,
        which costs a pass over the gradients.
        """
        recording = self.begin_trace()
        has_clock, no_time = not self._strategy.compiles_replicas, tf.zeros([], tf.float64)  # XLA has no clock
        arrival_time = clock.time_after(batch) if has_clock else no_time
        batch = clock.available_after(arrival_time, batch) if has_clock else batch
        # Whether values are computed from all rows
        is_whole = self.source.collectives.size == 1 or self.source.metrics.replicas_see_all_rows
        may_be_empty = isinstance(batch, ReplicaRows) and not is_whole
        rows = batch
        if not isinstance(rows, ReplicaRows):
            rows = ReplicaRows(batch, (count_rows(batch),), self.settings.batch_size)
        values = self.side_effects.begin()
        step, replica, replicas = self.source.random_seed_inputs(step)
        random_scope = randomness.replica_random_scope(self.source.seeds, self.settings.seed, step, replica, replicas)
        with collectives_scope(mask_if_empty(recording, rows.rows) if may_be_empty else recording), random_scope:
            gradients, value = self.source.local_gradients(rows, step, recording)
        previous_values = self.side_effects.end(values)
        self.sends_rows = recording.has_unknown_shapes
        statistics = [] if is_whole else self.side_effects.statistics_to_average((gradients, value), values)
        if may_be_empty:
            self.side_effects.undo_if_empty(rows.rows, values)
            *gradients, value = [_zero_if_empty(tensor, rows.rows) for tensor in (*gradients, value)]
        if statistics:
            assign(statistics, replica_means(statistics, rows.rows, recording, name="statistics"))
        is_timed = has_clock and self.source.has_local_time
        compute_seconds = clock.time_after(gradients) - arrival_time if is_timed else no_time
        reduction = self.reduce([*gradients, value])
        *gradients, value = reduction.totals
        with tf.name_scope("finite"):  # in profiles
            finite = reduction.all_finite(value)
        no_norm = tf.zeros([], keras.config.floatx())
        result = ComputeResult(
            gradients, reduction.state, [], previous_values, value, finite, no_norm, arrival_time, compute_seconds
        )
        result = self.source.agree(result, with_gradient_norm)
        gradients = self.settings.clip(result.gradients, result.norm)
        scale: Sequence[tf.Tensor] = ()
        if self.settings.loss_scale:
            state = [tf.convert_to_tensor(variable) for variable in self._scale]
            scale = self.settings.loss_scale.next_state(state, result.finite)
        return result._replace(gradients=gradients, scale=list(scale))

    def begin_trace(self) -> RecordingCollectives:
        """Begins a trace; returns collectives that record the calls of one replica in it."""
        self._recording = RecordingCollectives(self.source.collectives)
        return self._recording

    def apply(self, result: ComputeResult, unused_indices: frozenset[int]) -> None:
        """Applies a result of `compute`: updates weights, optimizer state and all other state. A replica function.

        Variables with `unused_indices`, for which no replica has a gradient, are not updated.
        """
        indices = [i for i in range(len(self.variables)) if i not in unused_indices]
        gradients, variables = [result.gradients[i] for i in indices], [self.variables[i] for i in indices]
        update = self._strategy.apply_locally if self.source.is_local else self._strategy.optimizer_shards.apply
        update(self.optimizer, gradients, variables)
        self.store_state(result)

    def store_state(self, result: ComputeResult) -> None:
        """Stores the state of the reducer and of the loss scale after a step was applied. A replica function."""
        self._reduction.assign(result.state)
        assign(self._scale, result.scale)

    def apply_if(self, condition: tf.Tensor, result: ComputeResult, count: Callable[[], Any]) -> None:
        """Applies a step of a local source and calls `count`, or skips it. A replica function, without communication."""
        unused_indices = self.unused_variables()

        def apply() -> None:
            self.apply(result, unused_indices)
            count()

        run_if(condition, apply, lambda: self.skip(result))

    def skip(self, result: ComputeResult) -> None:
        """Skips the step: undoes the forward pass and changes only the loss scale. A replica function."""
        self.undo(result)
        assign(self._scale, result.scale)

    @property
    def calls(self) -> list[RecordedCall]:
        """The collective calls of one replica in the latest trace."""
        return self._recording.calls

    def undo(self, result: ComputeResult) -> None:
        """Undoes the side effects of the forward pass in `compute`. A replica function."""
        self.side_effects.undo(result.previous_values)

    def with_condition(self, result: ComputeResult, condition: tf.Tensor) -> ComputeResult:
        """Returns a result that is applied only if `condition`, a scalar bool, is True. A replica function."""
        old_scale = [tf.convert_to_tensor(variable) for variable in self._scale]
        scale = [tf.where(condition, new, old) for new, old in zip(result.scale, old_scale, strict=True)]
        return result._replace(finite=tf.logical_and(result.finite, condition), scale=scale)

    def may_continue(self, finite: tf.Tensor, scale: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns whether the run may continue after this step, a scalar bool; see `ComputeResult`."""
        return tf.logical_or(finite, scale[-1] < self.settings.max_skipped_steps) if scale else finite

    def unused_variables(self) -> frozenset[int]:
        """Returns the indices of variables without a gradient on any replica; must be called after `compute` is traced.

        Peers compare the first trace, which they make together. Later traces for other shapes are not compared, because they
        may be made only by some processes. Raises `InputError` if replicas of other processes would make different collective
        calls.
        """
        if self._unused is not None:
            return self._unused
        agree_on_plan(self._strategy.peers, self._recording.calls)
        indices_by_process = self._strategy.peers.gather(
            "step/without_gradient", sorted(self.source.unused_variables()), TRACING_SECONDS
        )
        self._unused = unused = frozenset.intersection(*(frozenset(indices) for indices in indices_by_process))
        if unused:
            names = ", ".join(self.variables[i].path for i in sorted(unused))
            _log.warning("The loss does not depend on these variables, which are not updated: %s", names)
        return unused

    def reduce(self, tensors: list[tf.Tensor | tf.IndexedSlices]) -> ReductionResult:
        """Sums gradients and shares of the loss over replicas."""
        gradient_recording = RecordingCollectives(self._recording)
        reduction = self._reduction.reduce(tensors, gradient_recording, name="gradients")
        self.gradient_calls = (
            RecordingCollectives(self._recording) if self.source.keeps_gradients else gradient_recording
        )
        return reduction


def _zero_if_empty(value: tf.Tensor | tf.IndexedSlices, rows: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Returns a gradient or a share of the loss; zeros if the replica has no rows, where the value may be NaN."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_zero_if_empty(value.values, rows), value.indices, value.dense_shape)
    return tf.cond(rows > 0, lambda: value, lambda: tf.zeros_like(value))
