"""A step of a model with a custom `train_step` or `compute_loss`: its code runs unchanged, on each replica's rows.

Where it applies gradients, they are first summed over replicas, weighted by rows; see `tfdist.keras_fit.one_device` for
the assumptions about its losses. It may apply gradients several times, with several optimizers. A step that is not
finite cannot be undone.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, Recording, using
from tfdist.collectives.differentiable import losses_weighted
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import LossScale, Reduced, unscaled
from tfdist.keras_fit.one_device import Apply, running
from tfdist.keras_fit.partitioned_step import batch_for_replica, equal_value_weights, partitioned
from tfdist.keras_fit.placement import Placement
from tfdist.keras_fit.step_labels import ReduceOps
from tfdist.keras_fit.step_outputs import Logs, ReduceOp, inspect_step
from tfdist.step import randomness
from tfdist.step.compression import Compression
from tfdist.step.gradient_source import dense
from tfdist.step.layer_state import assign, average_over_rows, refuse_shared_variables, restore_unless, selected
from tfdist.step.loss import floating
from tfdist.step.metrics import KerasMetrics
from tfdist.step.reduction import Reduction, global_norm
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.validation import check_not_wrapped, check_optimizer, inner_optimizer, statistics_of_all_replicas


class _Application(NamedTuple):
    """One call of an optimizer's `apply` in a step."""

    optimizer: keras.Optimizer
    variables: list[keras.Variable]
    has_gradient: list[bool]


class CustomTrainStep:
    """The replica function that runs a custom `train_step`, or Keras's own on all rows.

    Attributes:
      returned: description of what the step returns.
      logs: what the last step returned.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        settings: Settings,
        compression: Compression,
        store: StateStore,
        spec: Any,
        placement: Placement,
    ):
        """Traces the model's code with one batch and creates its state.

        Args:
          model: compiled and built model.
          strategy: strategy on which it is trained.
          settings: options of the step; micro-steps and a loss scale besides the optimizer's are not supported.
          compression: how gradients are summed over replicas.
          store: store of the state.
          spec: structure of `tf.TensorSpec` of a batch.
          placement: places the variables that the code creates or updates.
        """
        if settings.micro_steps > 1 or settings.loss_scale:
            raise InputError(
                "A custom train_step or compute_loss, or a loss that needs all rows, takes the whole batch at once, and its "
                f"optimizer scales the loss. Received: accumulate_steps={settings.micro_steps}, "
                f"loss_scale={settings.loss_scale}. Leave them out; wrap the optimizer in a LossScaleOptimizer instead."
            )
        self._model, self._strategy, self._settings = model, strategy, settings
        self._recorded = Recording(strategy.step_collectives)
        applications: list[_Application] = []

        def apply(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
            applications.append(_Application(optimizer, list(variables), [g is not None for g in gradients]))

        def train_step(batch: Any) -> Any:
            applications.clear()  # a step that fails on variables that its first trace has created is traced again
            return model.train_step(batch)

        returned = inspect_step(model, train_step, spec, apply)
        for optimizer, variables, _ in applications:
            check_not_wrapped(optimizer)
            check_optimizer(inner_optimizer(optimizer), settings.clip)
            if not optimizer.built:
                with keras_internals.updating_one_device(optimizer):
                    optimizer.build(variables)
        updated = [variable for application in applications for variable in application.variables]
        metrics = KerasMetrics(model).variables
        placement.place([*model.variables, *metrics, *updated], [application.optimizer for application in applications])
        self._seeds = randomness.seed_states(model)
        synchronized = statistics_of_all_replicas(model)
        self._statistics = [v for v in keras_internals.moving_statistics(model) if id(v) not in synchronized]
        self._restored = [*self._statistics, *metrics]
        self.returned, self._store = returned, store
        self._reduce_ops = ReduceOps()
        self._averaged: list[keras.Variable] = []
        self._reductions = [_reduction(each, compression, store) for each in applications]

    @property
    def sends_rows(self) -> bool:
        """Whether the traced code sends a number of rows that may change from step to step."""
        return self._recorded.has_unknown_shapes

    def set_reduce_ops(self, reduce_ops: ReduceOps) -> None:
        """Sets how the replicas' values are combined; called once, before `run`."""
        self._reduce_ops = reduce_ops
        averaged = {id(variable) for variable in reduce_ops.statistics}
        self._averaged = [variable for variable in self._statistics if id(variable) in averaged]
        self.logs = Logs(self.returned, self._strategy, self._store, "train_step", reduce_ops.logs)

    def run(self, own_rows: ReplicaRows, number: tf.Tensor) -> None:
        """Runs a step. A replica function.

        Args:
          own_rows: the replica's rows.
          number: scalar int64; number of steps done so far.
        """
        self._recorded = collectives = Recording(self._strategy.step_collectives)  # of the latest trace
        if self._reduce_ops.partitioned:
            return self._run_partitioned(own_rows, number, collectives)
        ops = self._reduce_ops
        replica_batch = batch_for_replica(own_rows, collectives, bool(ops.needs_all_rows), ops.static_rows)
        before = [tf.identity(variable) for variable in self._restored]
        randomness.reseed(self._seeds, self._settings.seed, number, replica_batch.number)
        replica = replica_batch.replica._replace(apply=self._make_apply(replica_batch.weights, collectives))
        draws = randomness.own(self._seeds, self._settings.seed, number, replica_batch.number, collectives.size)
        with using(replica.collectives), running(replica), draws, keras_internals.functions_inlined():
            with losses_weighted(None if replica.has_all_rows else replica_batch.weights[ops.of_gradients]):
                operations = keras_internals.count_operations()
                logs = self._model.train_step(replica_batch.batch)
                refuse_shared_variables(self._model, self._strategy, operations)
        restore_unless(replica.rows > 0, self._restored, before)
        average_over_rows(self._averaged, replica_batch.weights["mean"], collectives)
        self.logs.store(logs, replica_batch.weights)
        return None

    def _run_partitioned(self, own_rows: ReplicaRows, number: tf.Tensor, collectives: Collectives) -> None:
        randomness.reseed(self._seeds, self._settings.seed, number, collectives.rank)
        with randomness.own(self._seeds, self._settings.seed, number, collectives.rank, collectives.size):
            result, application = partitioned(self._model, self._model.train_step, own_rows, collectives)
        result.assign()
        if application:
            apply = self._make_apply({"mean": floating(1)}, collectives, result.totals)
            apply(application.optimizer, application.gradients, application.variables)
        self.logs.store(result.values, equal_value_weights(collectives))

    def traced(self) -> None:
        """Compares the traced collective calls with other processes; called when `run` has first been traced."""
        agree_on_plan(self._strategy.peers, self._recorded.calls)

    def _make_apply(
        self,
        weights: Mapping[ReduceOp, tf.Tensor],
        collectives: Collectives,
        totals: Sequence[tf.Tensor] | None = None,
    ) -> Apply:
        """Returns what replaces an optimizer's `apply`: sums gradients first, unless those of the batch are given."""
        counter = itertools.count()

        def apply(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
            index = next(counter)
            reduction = self._reductions[index]
            pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
            weight = weights[self._reduce_ops.gradients[index] if self._reduce_ops.gradients else "mean"]
            weighted = [tf.math.multiply_no_nan(dense(g, v), tf.cast(weight, g.dtype)) for g, v in pairs]
            state = reduction.state()
            if totals is not None:
                reduced = Reduced(list(totals), list(totals), state, list(totals))
            else:
                reduced = reduction.reduce(weighted, collectives, name=f"gradients/{index}")
            updated = [variable for _, variable in pairs]
            with running(None):  # from here on, not the model's code
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                    finite = reduced.all_finite()
                    self._apply_scaled(optimizer, reduced.totals, updated, finite)
                    reduced = reduced._replace(state=selected(finite, reduced.state, state))
                else:
                    self._apply(optimizer, reduced.totals, updated)
            reduction.assign(reduced.state)

        return apply

    def _apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        self._strategy.apply(optimizer, self._settings.clip(gradients, global_norm(gradients)), variables)

    def _apply_scaled(
        self,
        optimizer: keras.optimizers.LossScaleOptimizer,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
        finite: tf.Tensor,
    ) -> None:
        """Applies gradients of a scaled loss, or nothing if they are not finite, and adjusts the scale, as Keras does.

        The update is always made, and restored if it must not count, since neither DTensor nor tf.distribute allows it in a
        condition: this takes the memory of another copy of the weights and the optimizer's state.
        """
        inner, own = optimizer.inner_optimizer, [optimizer.dynamic_scale, optimizer.step_counter]
        scale, steps = [tf.convert_to_tensor(variable) for variable in own]
        changed = [*variables, *inner.variables]
        before = [tf.identity(variable) for variable in changed]
        self._apply(inner, [unscaled(gradient, scale) for gradient in gradients], variables)
        rule = LossScale(initial=optimizer.initial_scale, growth_interval=optimizer.dynamic_growth_steps)
        after = rule.after([scale, steps, tf.constant(1), tf.constant(0)], finite)
        with self._strategy.own_copies([*changed, *own]):
            restore_unless(finite, changed, before)
            assign(own, [after.scale, after.good_steps])


def _reduction(application: _Application, compression: Compression, store: StateStore) -> Reduction:
    with_gradient = itertools.compress(application.variables, application.has_gradient)
    specs = [tf.TensorSpec(v.shape, v.dtype, v.path) for v in with_gradient]
    return Reduction(compression.reducer(specs, {}, frozenset()), specs, store)
