"""Runs a custom `train_step` or `compute_loss` unchanged on each replica's rows.

Gradients are summed over replicas, weighted by rows, where the step applies them, possibly several times; see
`tfdist.keras_fit.one_device` for the assumptions about losses. A step that is not finite cannot be undone.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, Recording, using
from tfdist.collectives.differentiable import loss_weight_scope
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import LossScale, ReductionResult, unscale
from tfdist.keras_fit.one_device import Apply, replica_context
from tfdist.keras_fit.partitioned_step import Application, batch_for_replica, equal_value_weights, run_partitioned
from tfdist.keras_fit.placement import Placement
from tfdist.keras_fit.step_labels import ReduceOps
from tfdist.keras_fit.step_outputs import Logs, ReduceOp, inspect_step
from tfdist.parameter_server.keyed_rows import keyed_layers
from tfdist.step import randomness
from tfdist.step.compression import Compression
from tfdist.step.gradient_source import to_dense
from tfdist.step.layer_state import assign, average_over_rows, refuse_shared_variables, restore_unless, select
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import KerasMetrics
from tfdist.step.reduction import Reduction, global_norm
from tfdist.step.settings import Settings, sparse_gradient_names
from tfdist.step.state_store import StateStore
from tfdist.step.validation import check_not_wrapped, check_optimizer, inner_optimizer, statistics_of_all_replicas


class CustomTrainStep:
    """The replica function that runs a custom `train_step`, or Keras's own on all rows.

    Attributes:
      outputs: specification of the step's outputs.
      logs: outputs of the last step.
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
          strategy: strategy of the model.
          settings: options of the step; micro-steps, and a loss scale other than the optimizer's, are not supported.
          compression: compression of gradients.
          store: store of the state.
          spec: structure of `tf.TensorSpec` of a batch.
          placement: places the variables that the code creates or updates.
        """
        if settings.micro_steps > 1 or settings.loss_scale:
            raise InputError(
                "A custom train_step or compute_loss takes the whole batch at once, and its optimizer scales the loss, as with "
                f"a loss that needs all rows. Received: accumulate_steps={settings.micro_steps}, "
                f"loss_scale={settings.loss_scale}. Leave them out; wrap the optimizer in a LossScaleOptimizer instead."
            )
        if keyed_layers(model):
            raise InputError(
                "A model with a DynamicEmbedding is trained by Keras's own steps. Received: a custom train_step or "
                "compute_loss. Use compile(loss=...) and add_loss."
            )
        self._model, self._strategy, self._settings = model, strategy, settings
        self._recording = Recording(strategy.step_collectives)
        applications: list[Application] = []

        def apply(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
            applications.append(Application(optimizer, gradients, list(variables)))

        def train_step(batch: Any) -> Any:
            applications.clear()  # a step is traced again if its first trace creates variables
            return model.train_step(batch)

        outputs = inspect_step(model, train_step, spec, apply)
        for optimizer, _, variables, _ in applications:
            check_not_wrapped(optimizer)
            check_optimizer(inner_optimizer(optimizer), settings.clip)
            if not optimizer.built:
                with keras_internals.updating_one_device(optimizer):
                    optimizer.build(variables)
        updated_variables = [variable for call in applications for variable in call.variables]
        metrics = KerasMetrics(model).variables
        placement.place([*model.variables, *metrics, *updated_variables], [call.optimizer for call in applications])
        self._seeds = randomness.seed_states(model)
        synchronized_ids = statistics_of_all_replicas(model)
        self._statistics = [v for v in keras_internals.moving_statistics(model) if id(v) not in synchronized_ids]
        self._pending_values = [*self._statistics, *metrics]
        self.outputs, self._store = outputs, store
        self._reduce_ops = ReduceOps()
        self._averaged_statistics: list[keras.Variable] = []
        self._sparse = frozenset() if strategy.sums_gradients else sparse_gradient_names(model)
        self._reductions = [_make_reduction(call, compression, store, self._sparse) for call in applications]

    @property
    def sends_rows(self) -> bool:
        """Whether the code, other than its gradients, sends tensors whose number of rows may change from step to step."""
        calls = [call for call in self._recording.calls if not call.name.startswith("gradients/")]
        return any(None in shape for call in calls for shape in call.shapes)

    def set_reduce_ops(self, reduce_ops: ReduceOps) -> None:
        """Sets how to combine the values of replicas; called once, before `run`."""
        self._reduce_ops = reduce_ops
        averaged_ids = {id(variable) for variable in reduce_ops.statistics}
        self._averaged_statistics = [variable for variable in self._statistics if id(variable) in averaged_ids]
        self.logs = Logs(self.outputs, self._strategy, self._store, "train_step", reduce_ops.logs)

    def run(self, own_rows: ReplicaRows, number: tf.Tensor) -> None:
        """Runs a step, inside a replica function.

        Args:
          own_rows: the replica's rows.
          number: scalar int64; number of completed steps.
        """
        self._recording = collectives = Recording(self._strategy.step_collectives)
        if self._reduce_ops.is_partitioned:
            return self._run_partitioned(own_rows, number, collectives)
        ops = self._reduce_ops
        replica_batch = batch_for_replica(own_rows, collectives, bool(ops.needs_all_rows), ops.static_rows)
        previous_values = [tf.identity(variable) for variable in self._pending_values]
        randomness.reseed(self._seeds, self._settings.seed, number, replica_batch.number)
        replica = replica_batch.replica._replace(apply=self._make_apply(replica_batch.weights, collectives))
        draws = randomness.replica_draws(
            self._seeds, self._settings.seed, number, replica_batch.number, collectives.size
        )
        with using(replica.collectives), replica_context(replica), draws, keras_internals.inline_functions():
            with loss_weight_scope(None if replica.has_all_rows else replica_batch.weights[ops.gradient_op]):
                operations = keras_internals.count_operations()
                logs = self._model.train_step(replica_batch.batch)
                refuse_shared_variables(self._model, self._strategy, operations)
        restore_unless(replica.rows > 0, self._pending_values, previous_values)
        average_over_rows(self._averaged_statistics, replica_batch.weights["mean"], collectives)
        self.logs.store(logs, replica_batch.weights)
        return None

    def _run_partitioned(self, own_rows: ReplicaRows, number: tf.Tensor, collectives: Collectives) -> None:
        randomness.reseed(self._seeds, self._settings.seed, number, collectives.rank)
        with randomness.replica_draws(self._seeds, self._settings.seed, number, collectives.rank, collectives.size):
            arguments = self._model, self._model.train_step, own_rows, collectives, self._sparse
            result, application = run_partitioned(*arguments)
        result.assign()
        if application:
            apply = self._make_apply({"mean": to_floatx(1)}, collectives, result.totals)
            apply(application.optimizer, application.gradients, application.variables)
        self.logs.store(result.values, equal_value_weights(collectives))

    def check_trace(self) -> None:
        """Compares the traced collective calls between processes, after the first trace of `run`."""
        agree_on_plan(self._strategy.peers, self._recording.calls)

    def _make_apply(
        self,
        weights: Mapping[ReduceOp, tf.Tensor],
        collectives: Collectives,
        totals: Sequence[tf.Tensor] | None = None,
    ) -> Apply:
        """Returns the replacement of an optimizer's `apply`, which sums gradients over replicas unless `totals` are given."""
        counter = itertools.count()

        def apply(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
            index = next(counter)
            reduction = self._reductions[index]
            pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
            weight = weights[self._reduce_ops.gradients[index] if self._reduce_ops.gradients else "mean"]
            gradients = [g if v.path in self._sparse else to_dense(g, v) for g, v in pairs]
            weighted_gradients = [_weighted(gradient, weight) for gradient in gradients]
            state = reduction.state()
            if totals is not None:
                reduction_result = ReductionResult(list(totals), list(totals), state, list(totals))
            else:
                reduction_result = reduction.reduce(weighted_gradients, collectives, name=f"gradients/{index}")
            updated_variables = [variable for _, variable in pairs]
            with replica_context(None):  # the model's code ends here
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                    is_finite = reduction_result.all_finite()
                    self._apply_scaled(optimizer, reduction_result.totals, updated_variables, is_finite)
                    reduction_result = reduction_result._replace(state=select(is_finite, reduction_result.state, state))
                else:
                    self._apply(optimizer, reduction_result.totals, updated_variables)
            reduction.assign(reduction_result.state)

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
        is_finite: tf.Tensor,
    ) -> None:
        """Applies gradients of a scaled loss if they are finite, and adjusts the scale, as Keras does.

        Neither DTensor nor tf.distribute allows a conditional update, so variables are restored if gradients are not finite.
        This takes the memory of another copy of the weights and the optimizer's state.
        """
        inner, scale_variables = optimizer.inner_optimizer, [optimizer.dynamic_scale, optimizer.step_counter]
        scale, steps = [tf.convert_to_tensor(variable) for variable in scale_variables]
        updated_variables = [*variables, *inner.variables]
        previous_values = [tf.identity(variable) for variable in updated_variables]
        self._apply(inner, [unscale(gradient, scale) for gradient in gradients], variables)
        rule = LossScale(initial=optimizer.initial_scale, growth_interval=optimizer.dynamic_growth_steps)
        new_state = rule.next_state([scale, steps, tf.constant(1), tf.constant(0)], is_finite)
        with self._strategy.own_copies([*updated_variables, *scale_variables]):
            restore_unless(is_finite, updated_variables, previous_values)
            assign(scale_variables, [new_state.scale, new_state.good_steps])


def _weighted(gradient: tf.Tensor | tf.IndexedSlices, weight: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_weighted(gradient.values, weight), gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


def _make_reduction(
    application: Application, compression: Compression, store: StateStore, sparse: Collection[str]
) -> Reduction:
    pairs = zip(application.gradients, application.variables, strict=True)
    specs = [tf.TensorSpec(v.shape, v.dtype, v.path) for gradient, v in pairs if gradient is not None]
    return Reduction(compression.reducer(specs, {}, sparse), specs, store)
