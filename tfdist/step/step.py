"""One training step as two replica functions.

`compute` is everything up to the reduced gradients and the global loss; `apply` updates weights and optimizer state. A loss
or gradient that is not finite changes neither. Collectives and updates are never inside a condition within a replica
function, where tf.distribute forbids them.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica, Recording, current, using
from tfdist.collectives.counted_rows import counting
from tfdist.collectives.trace_check import TRACING_SECONDS, agree_on_plan
from tfdist.data.batches import count_rows
from tfdist.data.replica_rows import ReplicaRows
from tfdist.distribution import clock
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.gradients import Reducer, accumulated, unscaled
from tfdist.row_semantics.explanation import Communication
from tfdist.step import loss, randomness
from tfdist.step.assigned_once import AssignedOnce
from tfdist.step.data_mismatch import not_compilable
from tfdist.step.metrics import LossShare, ModelMetrics
from tfdist.step.micro_step_state import MicroStepState
from tfdist.step.named_specs import named_specs
from tfdist.step.partitioned_step import communication, partitioned
from tfdist.step.reduction import Reduction, global_norm
from tfdist.step.scalar_metrics import scalars_weighted
from tfdist.step.settings import Settings
from tfdist.step.side_effects import SideEffects, assign, average_over_rows
from tfdist.step.state_store import StateStore
from tfdist.step.validation import inner_optimizer

_log = logging.getLogger(__name__)


class Computed(NamedTuple):
    """The result of `compute` for `apply` and the loop, on each replica.

    Attributes:
      gradients: reduced and clipped, equal on every replica.
      state: the reducer's new state, to be stored if the step is applied.
      scale: new state of the loss scale, whether the step is applied or not; empty without loss scaling.
      before: moving statistics, metrics and whatever else the forward pass assigns, before the step; to be restored if the
        step is not applied.
      loss: scalar; loss of the global batch, equal on every replica.
      finite: scalar bool; whether the loss and every gradient are finite, the same on every replica.
      norm: scalar; global gradient norm before clipping, if requested or needed, else 0.
      arrived: scalar float64; time at which the batch was available, in seconds since the epoch; 0 if there is no clock.
      busy: scalar float64; seconds from then to this replica's own gradients; 0 if there is no clock.
    """

    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    scale: list[tf.Tensor]
    before: list[tf.Tensor]
    loss: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor
    arrived: tf.Tensor
    busy: tf.Tensor


class Step:
    """The two halves of a step of one model, as replica functions of one strategy."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        reducer: Reducer,
        store: StateStore,
        settings: Settings,
        metrics: ModelMetrics,
        collectives: Collectives | None = None,
    ):
        """Initializes the step and creates its state.

        Args:
          model: model compiled and built under the strategy's scope.
          strategy: strategy whose replicas run the step.
          reducer: sums gradients over replicas.
          store: store of the state.
          settings: options of the step.
          metrics: metrics of the model.
          collectives: collectives of the replicas; by default the strategy's, with its algorithms.
        """
        self._model = model
        self._strategy = strategy
        self._collectives = collectives or strategy.step_collectives
        self.settings = settings
        self.variables = list(model.trainable_variables)
        self._metrics = metrics
        self._seeds = randomness.seed_states(model)
        self._without_gradient: list[frozenset[int]] = []
        self._unused: frozenset[int] | None = None
        specs = named_specs(self.variables, "loss")
        self._in_rows = [spec.name in settings.sparse for spec in specs[:-1]]
        self._reduction = Reduction(reducer, specs, store)
        self._scale = store.variables(settings.scale_state())
        self._side_effects = SideEffects(model, metrics.variables, strategy, settings.sparse, settings.averaged)
        self._micro_step_state = MicroStepState(model, strategy)
        self._recorded = Recording(self._collectives)
        self.sent: Recording | None = None
        self.sends_rows, self.message_bytes = False, 0  # bytes to other stages of a pipeline

    def compute(self, batch: Any, step: tf.Tensor, with_norm: tf.Tensor) -> Computed:
        """Runs forward pass, backward pass and reduction. A replica function.

        Args:
          batch: this replica's rows, at least one: (x, y) or (x, y, sample_weight), or a `ReplicaRows` of these.
          step: scalar int64; number of steps done so far.
          with_norm: scalar bool; whether to compute the global norm, which costs a pass over the gradients.
        """
        self._recorded = Recording(self._collectives)  # the calls of one replica in the latest trace
        with using(self._recorded):
            return self._computed(batch, step, with_norm)

    def _computed(self, batch: Any, step: tf.Tensor, with_norm: tf.Tensor) -> Computed:
        has_clock, no_time = not self._strategy.compiles_replicas, tf.zeros([], tf.float64)  # XLA's programs have none
        arrived = clock.time_after(batch) if has_clock else no_time
        batch = clock.available_after(arrived, batch) if has_clock else batch
        is_whole = self._collectives.size == 1 or self._is_partitioned  # its values are those of all rows
        if has_counts := isinstance(batch, ReplicaRows):
            batch, rows, batch_size = batch.batch, batch.rows, batch.batch_size
        else:
            rows, batch_size = count_rows(batch), self.settings.batch_size
        may_not_count = has_counts and not is_whole
        values = self._side_effects.begin()
        step, replica, replicas = self._drawn_from(step)
        randomness.reseed(self._seeds, self.settings.seed, step, replica)
        counted = counting(self._recorded, rows) if may_not_count else self._recorded
        with using(counted), randomness.own(self._seeds, self.settings.seed, step, replica, replicas):
            if self._is_partitioned:
                gradients, value = self._partitioned_gradients(batch, rows, batch_size)
            else:
                gradients, value = self._local_gradients(batch, self._divisor(batch, batch_size))
        before = self._side_effects.end(values)
        self.sends_rows = self._recorded.has_unknown_shapes
        averaged = [] if is_whole else self._side_effects.averaged((gradients, value), values)
        if may_not_count:
            self._side_effects.undo_unless(rows, values)
            *gradients, value = [_if_counted(each, rows) for each in (*gradients, value)]
        if averaged:
            average_over_rows(averaged, rows, self._recorded)
        busy = clock.time_after(gradients) - arrived if has_clock else no_time
        self.sent = Recording(self._recorded)  # the calls that send gradients
        reduced = self._reduction.reduce([*gradients, value], self.sent, name="gradients")
        *whole, value = reduced.totals
        with tf.name_scope("finite"):  # in profiles
            finite = reduced.all_finite(value)
        whole, value, finite, norm = self._agreed(whole, value, finite, with_norm)
        clipped = self.settings.clip(whole, norm)
        return Computed(clipped, reduced.state, self._scale_after(finite), before, value, finite, norm, arrived, busy)

    def apply(self, computed: Computed, unused: frozenset[int]) -> None:
        """Applies the step: updates weights, optimizer state and all other state. A replica function.

        Args:
          computed: result of `compute`.
          unused: indices of the variables for which no replica has a gradient; they are not updated.
        """
        used = [i for i in range(len(self.variables)) if i not in unused]
        gradients, variables = [computed.gradients[i] for i in used], [self.variables[i] for i in used]
        self._apply_gradients(gradients, variables)
        self._reduction.assign(computed.state)
        assign(self._scale, computed.scale)

    def _apply_gradients(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        """Updates the weights and the optimizer's state."""
        self._strategy.optimizer_shards.apply(inner_optimizer(self._model.optimizer), gradients, variables)

    def skip(self, computed: Computed) -> None:
        """Skips the step: only the loss scale changes, and the forward pass is undone. A replica function."""
        self.undo(computed)
        assign(self._scale, computed.scale)

    def undo(self, computed: Computed) -> None:
        """Undoes the side effects of the forward pass in `compute`. A replica function."""
        self._side_effects.undo(computed.before)

    def held(self, computed: Computed, going: tf.Tensor) -> Computed:
        """Returns `computed`, marked as not to be applied if `going`, a scalar bool, is False. A replica function."""
        scale = [
            tf.where(going, new, tf.convert_to_tensor(old))
            for new, old in zip(computed.scale, self._scale, strict=True)
        ]
        return computed._replace(finite=tf.logical_and(computed.finite, going), scale=scale)

    def may_continue(self, computed: Computed) -> tf.Tensor:
        """Returns whether the run may continue after this step, a scalar bool; outside of replica functions."""
        finite = self._strategy.local(computed.finite)[0]
        if not self._scale:
            return finite
        skipped_in_a_row = self._strategy.local(computed.scale[-1])[0]
        return tf.logical_or(finite, skipped_in_a_row < self.settings.max_skipped_steps)

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
        mine = frozenset.intersection(*self._without_gradient) if self._without_gradient else frozenset()
        everyone = self._strategy.peers.gather("step/without_gradient", sorted(mine), TRACING_SECONDS)
        self._unused = unused = frozenset.intersection(*(frozenset(indices) for indices in everyone))
        if unused:
            names = ", ".join(self.variables[i].path for i in sorted(unused))
            _log.warning("The loss does not depend on these variables, which are not updated: %s", names)
        return unused

    def _local_gradients(self, batch: Any, batch_size: int | tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns this replica's gradients and its share of the loss, computed at once or in micro-steps."""
        differentiate = self._compiled(self._differentiate)
        if self.settings.micro_steps == 1:
            return self._micro_step(differentiate, batch, batch_size)
        # The denominators of the whole batch are computed first, so that nothing is sent between micro-steps. Only the
        # masks of this forward pass are used; the rest of its graph is never run.
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        with self._strategy.layouts.computing(self.variables):
            values = [(variable, variable.value) for variable in self._model.variables]
            with keras.StatelessScope(state_mapping=values):  # it must not update metrics of layers
                outputs = self._strategy.layouts.by_rows(self._model(x, training=False))
        parts = loss.terms(self._model, y, outputs, weight)
        totals = loss.totals(parts, batch_size, current())
        # Without loops, the graph contains all micro-steps.
        shards = 0 if self._strategy.compiles_loops else self._strategy.layouts.row_shards
        once, state = AssignedOnce(), self._micro_step_state
        state.begin()

        def micro_step(rows: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
            with once.micro_step() if shards else contextlib.nullcontext(), state.micro_step():
                part = self._strategy.layouts.by_rows(rows)
                gradients, value = self._micro_step(differentiate, part, batch_size, totals)
                return [*gradients, *state.end(count_rows(rows))], value

        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        dtype, every = tf.as_dtype(keras.config.floatx()), [*specs, *state.specs()]
        with using(_MicroStepCollectives(self._recorded)):
            sums, value = accumulated(micro_step, batch, self.settings.micro_steps, every, dtype, shards)
        with once.micro_step() if shards else contextlib.nullcontext():
            state.set_means(sums[len(specs) :])
        once.assign()
        return sums[: len(specs)], value

    def communication(self, spec: Any) -> Communication:
        """Returns what replicas communicate if the step is partitioned.

        Args:
          spec: structure of `tf.TensorSpec` of a batch.
        """
        return communication(self._model, self._metrics.variables, self._of_one_device, spec)

    @property
    def _is_partitioned(self) -> bool:
        return self._metrics.count_all_rows

    def _partitioned_gradients(
        self, batch: Any, rows: tf.Tensor, batch_size: int | tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns this replica's shares of the gradients and of the loss that one device computes from all rows."""
        own_rows = ReplicaRows(batch, (rows,), tf.convert_to_tensor(batch_size))
        result = partitioned(self._model, self._metrics.variables, self._of_one_device, own_rows, self._recorded)
        result.assign()
        value = result.values["loss"]
        return result.gradients, value / tf.cast(self._collectives.size, value.dtype)

    def _of_one_device(self, batch: Any) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        gradients, value = self._micro_step(self._differentiate, batch, count_rows(batch))
        return gradients, {"loss": value}

    def _drawn_from(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int, int]:
        """Returns the step, the replica and the number of replicas from which random layers draw."""
        return step, self._strategy.collectives.rank, self._strategy.collectives.size

    def _divisor(self, batch: Any, batch_size: int | tf.Tensor) -> int | tf.Tensor:
        """Returns the number of rows over which the loss is a mean."""
        return batch_size

    def _micro_step(
        self,
        differentiate: Callable[..., Any],
        batch: Any,
        batch_size: int | tf.Tensor,
        totals: list[tf.Tensor] | None = None,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        gradients, share, outputs = differentiate(batch, batch_size, totals)
        _, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        self._metrics.update(y, outputs, weight, self._for_metrics(share))
        return gradients, share.value

    def _for_metrics(self, share: LossShare) -> LossShare:
        """Returns the share of the loss such that those of all replicas add up to the mean over the global batch."""
        return share

    def _compiled(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        if not self.settings.jit_compile:
            return differentiate

        compiled = tf.function(differentiate, jit_compile=True, autograph=False)

        def without_communication(*args: Any) -> Any:
            try:
                return compiled(*args)
            except (RuntimeError, tf.errors.OpError) as error:
                raise not_compilable(str(error).splitlines()[0]) from error

        return compiled if isinstance(self._collectives, OneReplica) else without_communication

    def _differentiate(
        self, batch: Any, batch_size: int | tf.Tensor, totals: list[tf.Tensor] | None = None
    ) -> tuple[list[tf.Tensor], LossShare, Any]:
        scale = tf.convert_to_tensor(self._scale[0]) if self._scale else None

        def scaled_loss(batch: Any) -> tuple[tf.Tensor, Any]:
            value, share, outputs = self._loss(batch, batch_size, totals)
            return (value if scale is None else value * tf.cast(scale, value.dtype)), (share, outputs)

        gradients, _, (share, outputs) = self._strategy.gradients(scaled_loss, self.variables, batch)
        self._without_gradient.append(frozenset(i for i, g in enumerate(gradients) if g is None))
        takes_rows = self.settings.micro_steps == 1
        whole = [
            g if takes_rows and in_rows and isinstance(g, tf.IndexedSlices) else dense(g, v)
            for g, v, in_rows in zip(gradients, self.variables, self._in_rows, strict=True)
        ]
        return (whole if scale is None else [unscaled(g, scale) for g in whole]), share, outputs

    def _loss(self, batch: Any, batch_size: int | tf.Tensor, totals: list[tf.Tensor] | None) -> tuple[Any, ...]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        rows = tf.shape(keras.tree.flatten(x)[0])[0]
        with scalars_weighted(loss.floating(rows) / loss.floating(batch_size)):
            outputs = self._strategy.layouts.by_rows(self._model(x, training=True))
        parts = loss.terms(self._model, y, outputs, weight)
        if totals is None:
            totals = loss.totals(parts, batch_size, current())
        value = loss.training_loss(self._model, parts, totals, rows, batch_size=batch_size)
        recorded = loss.recorded_loss(self._model, value, parts, totals, rows, batch_size)
        return value, LossShare(*recorded, rows, batch_size), outputs

    def _agreed(
        self, gradients: list[tf.Tensor], value: tf.Tensor, finite: tf.Tensor, with_norm: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the gradients, and the loss, whether the step is finite, and the norm, the same on every process."""
        if self.settings.clip.norm:
            return gradients, value, finite, global_norm(gradients)
        zero = tf.zeros([], keras.config.floatx())
        return gradients, value, finite, tf.cond(with_norm, lambda: global_norm(gradients), lambda: zero)

    def _scale_after(self, finite: tf.Tensor) -> list[tf.Tensor]:
        if self.settings.loss_scale is None:
            return []
        return list(self.settings.loss_scale.after([tf.convert_to_tensor(v) for v in self._scale], finite))


class _MicroStepCollectives(Recording):
    """Rejects communication between micro-steps, whose number may differ between replicas."""

    def _on_call(self, operation: str, tensors: Sequence[tf.Tensor], name: str) -> None:
        """See base class."""
        raise InputError(
            "A layer or loss that communicates takes the whole batch at once. Received: accumulate_steps > 1 and a "
            f"call of {operation} ({name}). Leave out accumulate_steps."
        )


def _if_counted(value: tf.Tensor | tf.IndexedSlices, rows: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Returns a gradient or a share of the loss; zeros, even for NaN, if no row of the replica counts."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_if_counted(value.values, rows), value.indices, value.dense_shape)
    return tf.cond(rows > 0, lambda: value, lambda: tf.zeros_like(value))


def dense(gradient: tf.Tensor | tf.IndexedSlices | None, variable: keras.Variable) -> tf.Tensor:
    """Returns a dense gradient, which all replicas can send: zeros for None, rows scattered to their indices."""
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    whole = tf.convert_to_tensor(gradient)
    whole.set_shape(variable.shape)  # tf.ensure_shape would be an operation that DTensor does not support
    return whole
