"""One training step as two replica functions.

`compute` is everything up to the reduced gradients and the global loss; `apply` updates weights and optimizer state. A loss
or gradient that is not finite changes neither. Collectives and updates are never inside a condition within a replica
function, where tf.distribute forbids them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Recording, using
from tfdist.collectives.rows import counting
from tfdist.collectives.trace_check import TRACING_SECONDS, agree_on_plan
from tfdist.data.batches import count_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution import clock
from tfdist.gradients import Reduced, Reducer
from tfdist.step import randomness
from tfdist.step.gradient_source import GradientSource
from tfdist.step.layer_state import SideEffects, assign, average_over_rows
from tfdist.step.reduction import Computed, Reduction, run_if
from tfdist.step.settings import named_specs
from tfdist.step.state_store import StateStore
from tfdist.step.validation import inner_optimizer

_log = logging.getLogger(__name__)


class Step:
    """A step of one model: gradients of a source, their reduction, and an update; replica functions of one strategy."""

    def __init__(self, source: GradientSource, reducer: Reducer, store: StateStore):
        self.source, self.settings, self.variables = source, source.settings, source.variables
        self._strategy = source.strategy
        self.optimizer = inner_optimizer(source.model.optimizer)
        self._unused: frozenset[int] | None = None
        self._reduction = Reduction(reducer, named_specs(self.variables, "loss"), store)
        self._scale = source.scale
        self._side_effects = SideEffects(
            source.model, source.metrics.variables, self._strategy, self.settings.sparse, self.settings.averaged
        )
        self._recorded = Recording(source.collectives)
        self.sent: Recording | None = None
        self.sends_rows = False

    def compute(self, batch: Any, step: tf.Tensor, with_norm: tf.Tensor) -> Computed:
        """Runs forward pass, backward pass and reduction. A replica function.

        Args:
          batch: this replica's rows, at least one: (x, y) or (x, y, sample_weight), or a `ReplicaRows` of these.
          step: scalar int64; number of steps done so far.
          with_norm: scalar bool; whether to compute the global norm, which costs a pass over the gradients.
        """
        self._recorded = Recording(self.source.collectives)  # the calls of one replica in the latest trace
        with using(self._recorded):
            return self._computed(batch, step, with_norm)

    def _computed(self, batch: Any, step: tf.Tensor, with_norm: tf.Tensor) -> Computed:
        has_clock, no_time = not self._strategy.compiles_replicas, tf.zeros([], tf.float64)  # XLA's programs have none
        arrived = clock.time_after(batch) if has_clock else no_time
        batch = clock.available_after(arrived, batch) if has_clock else batch
        is_whole = self.source.collectives.size == 1 or self.source.is_partitioned  # its values are those of all rows
        may_not_count = isinstance(batch, ReplicaRows) and not is_whole
        rows = (
            batch
            if isinstance(batch, ReplicaRows)
            else ReplicaRows(batch, (count_rows(batch),), self.settings.batch_size)
        )
        values = self._side_effects.begin()
        step, replica, replicas = self.source.draws(step)
        randomness.reseed(self.source.seeds, self.settings.seed, step, replica)
        counted = counting(self._recorded, rows.rows) if may_not_count else self._recorded
        with using(counted), randomness.own(self.source.seeds, self.settings.seed, step, replica, replicas):
            gradients, value = self.source.local(rows, step, self._recorded)
        before = self._side_effects.end(values)
        self.sends_rows = self._recorded.has_unknown_shapes
        averaged = [] if is_whole else self._side_effects.averaged((gradients, value), values)
        if may_not_count:
            self._side_effects.undo_unless(rows.rows, values)
            *gradients, value = [_if_counted(each, rows.rows) for each in (*gradients, value)]
        if averaged:
            average_over_rows(averaged, rows.rows, self._recorded)
        busy = clock.time_after(gradients) - arrived if has_clock and self.source.has_own_time else no_time
        reduced = self._reduced([*gradients, value])
        *gradients, value = reduced.totals
        with tf.name_scope("finite"):  # in profiles
            finite = reduced.all_finite(value)
        no_norm = tf.zeros([], keras.config.floatx())
        computed = Computed(gradients, reduced.state, [], before, value, finite, no_norm, arrived, busy)
        computed = self.source.agreed(computed, with_norm)
        clipped = self.settings.clip(computed.gradients, computed.norm)
        return computed._replace(gradients=clipped, scale=self._scale_after(computed.finite))

    def apply(self, computed: Computed, unused: frozenset[int]) -> None:
        """Applies the step: updates weights, optimizer state and all other state. A replica function.

        Args:
          computed: result of `compute`.
          unused: indices of the variables for which no replica has a gradient; they are not updated.
        """
        used = [i for i in range(len(self.variables)) if i not in unused]
        gradients, variables = [computed.gradients[i] for i in used], [self.variables[i] for i in used]
        update = self._strategy.apply_locally if self.source.is_local else self._strategy.optimizer_shards.apply
        update(self.optimizer, gradients, variables)
        self._reduction.assign(computed.state)
        assign(self._scale, computed.scale)

    def apply_if(self, condition: tf.Tensor, computed: Computed, count: Callable[[], Any]) -> None:
        """Applies and counts a step of a local source, or skips it. A replica function, without communication."""
        unused = self.unused()

        def apply() -> None:
            self.apply(computed, unused)
            count()

        run_if(condition, apply, lambda: self.skip(computed))

    def skip(self, computed: Computed) -> None:
        """Skips the step: only the loss scale changes, and the forward pass is undone. A replica function."""
        self.undo(computed)
        assign(self._scale, computed.scale)

    def undo(self, computed: Computed) -> None:
        """Undoes the side effects of the forward pass in `compute`. A replica function."""
        self._side_effects.undo(computed.before)

    def gated(self, computed: Computed, condition: tf.Tensor) -> Computed:
        """Returns `computed`, marked as not to be applied if `condition`, a scalar bool, is False. A replica function."""
        scale = [
            tf.where(condition, new, tf.convert_to_tensor(old))
            for new, old in zip(computed.scale, self._scale, strict=True)
        ]
        return computed._replace(finite=tf.logical_and(computed.finite, condition), scale=scale)

    def may_continue(self, finite: tf.Tensor, scale: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns whether the run may continue after this step, a scalar bool, given `Computed.finite` and `scale`."""
        return tf.logical_or(finite, scale[-1] < self.settings.max_skipped_steps) if scale else finite

    def unused(self) -> frozenset[int]:
        """Returns the variables for which no replica has a gradient; to be called after `compute` is traced.

        Peers make their first trace together and compare it. Retraces for other shapes, which may happen on
        some processes only, are not compared.

        Raises:
          InputError: replicas of other processes would make different collective calls.
        """
        if self._unused is not None:
            return self._unused
        agree_on_plan(self._strategy.peers, self._recorded.calls)
        everyone = self._strategy.peers.gather("step/without_gradient", sorted(self.source.unused()), TRACING_SECONDS)
        self._unused = unused = frozenset.intersection(*(frozenset(indices) for indices in everyone))
        if unused:
            names = ", ".join(self.variables[i].path for i in sorted(unused))
            _log.warning("The loss does not depend on these variables, which are not updated: %s", names)
        return unused

    def _reduced(self, tensors: list[tf.Tensor | tf.IndexedSlices]) -> Reduced:
        """Sums gradients and shares of the loss over replicas."""
        sent = Recording(self._recorded)
        reduced = self._reduction.reduce(tensors, sent, name="gradients")
        self.sent = Recording(self._recorded) if self.source.keeps_gradients else sent  # the calls that send gradients
        return reduced

    def _scale_after(self, finite: tf.Tensor) -> list[tf.Tensor]:
        if self.settings.loss_scale is None:
            return []
        return list(self.settings.loss_scale.after([tf.convert_to_tensor(v) for v in self._scale], finite))


def _if_counted(value: tf.Tensor | tf.IndexedSlices, rows: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Returns a gradient or a share of the loss; zeros, even for NaN, if no row of the replica counts."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_if_counted(value.values, rows), value.indices, value.dense_shape)
    return tf.cond(rows > 0, lambda: value, lambda: tf.zeros_like(value))
