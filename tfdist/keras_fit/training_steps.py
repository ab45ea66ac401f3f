"""Runs the training and evaluation steps of Keras's methods on replicas, in compiled loops."""

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, RecordingCollectives, collectives_scope
from tfdist.collectives.differentiable import loss_weight_scope
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.config.job_config import RunConfig
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError, NotFiniteError, with_argument_names
from tfdist.gradients import Clip, LossScale, ReductionResult, parse_loss_scale, unscale
from tfdist.keras_fit.batch_readers import BatchReader
from tfdist.keras_fit.one_device import Apply, replica_context
from tfdist.keras_fit.partitioned_step import ApplyCall, batch_for_replica, equal_value_weights, run_partitioned
from tfdist.keras_fit.placement import Placement
from tfdist.keras_fit.step_labels import ReduceOps
from tfdist.keras_fit.step_outputs import ReduceOp, StepOutputs, flatten_logs, inspect_step
from tfdist.parameter_server.dynamic_embedding_tables import keyed_layers
from tfdist.reporting.warn_once import warn_once
from tfdist.step import randomness, validation
from tfdist.step.compiled_loop import compile_loop, compile_single_step, make_host_loop, not_finite_error
from tfdist.step.compiled_steps import Steps
from tfdist.step.compression import Compression
from tfdist.step.gradient_source import to_dense
from tfdist.step.layer_state import assign, refuse_shared_variables, replica_means, restore_unless, select
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import KerasMetrics
from tfdist.step.reduction import Reduction, global_norm
from tfdist.step.settings import Settings, sparse_gradient_names
from tfdist.step.state_store import StateStore
from tfdist.synchronization import WeightSynchronizer


class StepsResult(NamedTuple):
    """The result of several steps."""

    steps: int  # number of completed steps
    outputs: Mapping[str, Any] = {}  # outputs of the last step, if it is a custom step
    # For each output that is the result of a metric, the name of the metric as in `KerasMetrics.by_metric`
    sources: Mapping[str, str] = {}
    failure: NotFiniteError | None = None  # error to raise if the last step was not finite
    sums: Sequence[tf.Tensor] = ()  # sums of the metrics' variables over replicas, if the call has reset them


class TrainerSteps:
    """The trainer's step, for a model with Keras's own steps."""

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        options: RunConfig,
        metrics: KerasMetrics,
        synchronizer: WeightSynchronizer,
        reduce_ops: ReduceOps,
    ):
        self.needs_all_rows = bool(reduce_ops.needs_all_rows)  # then metrics are kept between batches, on one replica
        settings = _settings(model, strategy, options)
        settings = dataclasses.replace(settings, averaged_statistics=tuple(reduce_ops.statistics))
        if not model.trainable_variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)  # as in Keras
        self._store = StateStore(strategy)
        if settings.loss_scale:
            self._store.variables(settings.loss_scale.state())
        self._model, self._synchronizer = model, synchronizer
        self._steps = Steps(model, strategy, settings, _compression(options), self._store, metrics)
        self._compile_one_step = functools.partial(compile_single_step, metrics)
        if strategy.is_chief and (text := self._steps.idle_compression):
            warn_once(with_argument_names(text))

    def run(self, batches: Any, max_steps: int, first_step: int) -> StepsResult:
        """Runs up to `max_steps` steps of a `BatchReader`, or one step of a `ReplicaRows`, with indices from `first_step`."""
        is_reader = isinstance(batches, BatchReader)
        if is_reader and self._steps.sends_rows:
            return self._run_separately(batches, batches.next_count(max_steps), first_step)
        steps = batches.next_count(max_steps) if is_reader else 1
        compile_for = compile_loop if is_reader else make_host_loop
        if is_reader and max_steps == 1 and not self.needs_all_rows:
            compile_for = self._compile_one_step
        loop = self._synchronizer.loop(self._steps, None, 1.0, first_step, compile_for)
        rows = batches.rows if is_reader else iter([batches])
        result = loop(rows, tf.constant(first_step, tf.int64), tf.constant(steps), tf.constant(False))
        losses = result.losses.numpy()  # fewer than `steps` if one was not finite
        if is_reader:
            batches.advance(len(losses))
        if bool(result.may_continue):
            return StepsResult(len(losses), sums=result.sums)
        last_step, variables = first_step + len(losses) - 1, self._model.trainable_variables
        failure = not_finite_error(last_step, losses[-1], result, variables, self.loss_scale)
        return StepsResult(len(losses), failure=failure)

    def _run_separately(self, batches: BatchReader, steps: int, first_step: int) -> StepsResult:
        for index in range(steps):
            result = self.run(next(batches), 1, first_step + index)
            if result.failure:
                return result._replace(steps=index + 1)
        return StepsResult(steps)

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None without loss scaling."""
        return self._store.loss_scale


class _ModelSteps:
    """A model's `train_step` or `test_step`, computed on each replica's rows, on all rows, or partitioned, and its loops."""

    _name: str  # of the model's method
    needs_all_rows = False  # whether replicas compute the values of whole batches

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        collectives: Collectives,
        random_scope: Callable[..., contextlib.AbstractContextManager[None]],
        seed: int,
    ):
        """Initializes the steps; `random_scope` is a function of `randomness` that seeds a replica's random numbers."""
        self._model, self._strategy, self._collectives = model, strategy, collectives
        self._random_scope, self._seed = random_scope, seed
        self._recording, self._store = RecordingCollectives(collectives), StateStore(strategy)
        self._statistics: Sequence[keras.Variable] = ()  # restored on a replica without rows, like metrics
        self._averaged_statistics: Sequence[keras.Variable] = ()
        self._sparse: Collection[str] = ()
        self.outputs, self._reduce_ops = StepOutputs(), ReduceOps()
        self.compile()

    def compile(self) -> None:
        """Causes the step to be traced again; all processes compare the first trace of each loop before it runs."""
        strategy = self._strategy

        def check_trace() -> None:
            agree_on_plan(strategy.peers, self._recording.calls)

        check_call, check_loop = functools.cache(check_trace), functools.cache(check_trace)

        def run_batch(batch: Any, number: tf.Tensor) -> None:
            strategy.run(self._run, batch, tf.cast(number, tf.int64))
            check_call()

        def run_step(batch: Any, number: tf.Tensor) -> None:
            # If the data ends unexpectedly, no part of the step may run, not even parts that do not depend on the data.
            leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
            with tf.control_dependencies(leaves):
                self._run(batch, number)

        def loop(rows: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor) -> None:
            def body(index: tf.Tensor) -> tf.Tensor:
                strategy.run(run_step, next(rows), first_step + tf.cast(index, tf.int64))
                check_loop()
                return index + 1

            tf.while_loop(lambda index: index < steps, body, (tf.constant(0),), parallel_iterations=1)

        self._run_batch = strategy.compiled(run_batch)
        self._loop = tf.function(loop, autograph=False, reduce_retracing=True)

    def _run_batches(self, batches: Any, max_steps: int, first_step: int) -> int:
        """Runs the step for a `ReplicaRows`, or for up to `max_steps` batches of a `BatchReader`; returns their number."""
        steps = batches.next_count(max_steps) if isinstance(batches, BatchReader) else 1
        # Only gradients have the same shapes in each step. The number of rows of other tensors may change, which TensorFlow's
        # collectives between processes do not support within one call of a compiled function.
        calls = [call for call in self._recording.calls if not call.name.startswith("gradients/")]
        sends_rows = any(None in shape for call in calls for shape in call.shapes)
        if isinstance(batches, BatchReader) and self._strategy.compiles_loops and not sends_rows:
            self._loop(batches.rows, tf.constant(first_step, tf.int64), tf.constant(steps))
            batches.advance(steps)
            return steps
        for step in range(first_step, first_step + steps):
            batch = next(batches) if isinstance(batches, BatchReader) else batches
            # DTensor treats a small int64 as a compile-time constant, and recompiles the program when it changes.
            self._run_batch(batch, tf.constant(step, tf.uint64))
        return steps

    def _set_reduce_ops(self, reduce_ops: ReduceOps) -> None:
        self._reduce_ops, self.needs_all_rows = reduce_ops, bool(reduce_ops.needs_all_rows)
        dtype, shapes = tf.as_dtype(keras.config.floatx()), self.outputs.shapes
        states = [State(f"{self._name}/{key}", shape, dtype, True) for key, shape in shapes.items()]
        self._logs = dict(zip(shapes, self._store.variables(states), strict=True))

    def _store_logs(self, outputs: Mapping[str, Any], weights: Mapping[ReduceOp, tf.Tensor]) -> None:
        """Stores the outputs of all replicas, combined by their ops (by default, as means). A replica function."""
        values_by_name, ops = flatten_logs(outputs), self._reduce_ops.logs
        values = [
            tf.math.multiply_no_nan(to_floatx(values_by_name[key]), weights[ops.get(key, "mean")]) for key in self._logs
        ]
        if values:
            assign([*self._logs.values()], self._strategy.collectives.all_reduce(values, name=self._name))

    def _read_logs(self) -> dict[str, np.ndarray]:
        return {key: np.asarray(self._strategy.local(variable)[0]) for key, variable in self._logs.items()}

    def _make_apply(
        self, weights: Mapping[ReduceOp, tf.Tensor], collectives: Collectives, totals: Sequence[tf.Tensor] | None = None
    ) -> Apply | None:
        """Returns the replacement of an optimizer's `apply`, which sums gradients over replicas unless `totals` has sums.

        None if the step applies no gradients.
        """
        return None

    def _run(self, own_rows: ReplicaRows, number: tf.Tensor) -> None:
        """Runs step `number`, a scalar int64. A replica function."""
        model, strategy, ops = self._model, self._strategy, self._reduce_ops
        self._recording = collectives = RecordingCollectives(self._collectives)
        step, size = getattr(model, self._name), collectives.size
        random_scope = functools.partial(self._random_scope, randomness.seed_states(model), self._seed, number)
        layouts = strategy.layouts.compute_layouts(model.trainable_variables)
        if ops.is_partitioned:
            with layouts, random_scope(collectives.rank, size):
                result, application = run_partitioned(model, step, own_rows, collectives, self._sparse)
            result.assign()
            apply = self._make_apply({"mean": to_floatx(1)}, collectives, result.totals)
            if application and apply:
                apply(application.optimizer, application.gradients, application.variables)
            self._store_logs(result.values, equal_value_weights(collectives))
            return
        batch, weights, seed_index, replica = batch_for_replica(
            own_rows, collectives, self.needs_all_rows, ops.static_rows
        )
        variables = [*self._statistics, *KerasMetrics(model).variables]
        previous_values = [tf.identity(variable) for variable in variables]
        replica = replica._replace(apply=self._make_apply(weights, collectives))
        loss_weight = None if replica.has_all_rows or replica.apply is None else weights[ops.gradient_op]
        with layouts, random_scope(seed_index, size), collectives_scope(replica.collectives), replica_context(replica):
            with keras_internals.inline_functions(), loss_weight_scope(loss_weight):
                operations = keras_internals.count_operations()
                outputs = step(batch)
                refuse_shared_variables(model, strategy, operations)
        restore_unless(replica.rows > 0, variables, previous_values)
        statistics = self._averaged_statistics
        assign(statistics, replica_means(statistics, weights["mean"], collectives, name="statistics"))
        self._store_logs(outputs, weights)


class CustomSteps(_ModelSteps):
    """A custom `train_step` or `compute_loss`, or Keras's own step for a loss that is not a mean over rows.

    Gradients, weighted by rows, are summed over replicas where the step applies them, which it may do several times; see
    `tfdist.keras_fit.one_device` for the assumptions about losses. A step whose loss is not finite cannot be undone.
    """

    _name = "train_step"
    loss_scale = None

    def __init__(self, model: keras.Model, strategy: Strategy, options: RunConfig, spec: Any, placement: Placement):
        """Traces the model's code with `spec`, a structure of `tf.TensorSpec`, and places the variables that it creates."""
        loss_scale = parse_loss_scale(options.loss_scale)
        settings = dataclasses.replace(_settings(model, strategy, options), loss_scale=loss_scale)
        if settings.micro_steps > 1 or settings.loss_scale:
            raise InputError(
                "A custom train_step or compute_loss, like a loss that needs all rows, takes the whole batch at once and lets "
                f"the optimizer scale the loss. Received: accumulate_steps={settings.micro_steps}, "
                f"loss_scale={settings.loss_scale}. Remove these settings; to scale losses, use a LossScaleOptimizer."
            )
        if keyed_layers(model):
            raise InputError(
                "A model with a DynamicEmbedding must be trained by Keras's own steps. Received: a custom train_step or "
                "compute_loss. Use compile(loss=...) and add_loss."
            )
        super().__init__(model, strategy, strategy.step_collectives, randomness.replica_random_scope, settings.seed)
        self._settings = settings
        applications: list[ApplyCall] = []

        def apply(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
            applications.append(ApplyCall(optimizer, gradients, list(variables)))

        def train_step(batch: Any) -> Any:
            applications.clear()  # a step is traced again if its first trace creates variables
            return model.train_step(batch)

        self.outputs = inspect_step(model, train_step, spec, apply)
        for optimizer, _, variables, _ in applications:
            validation.check_not_wrapped(optimizer)
            validation.check_optimizer(validation.inner_optimizer(optimizer), settings.clip)
            if not optimizer.built:
                with keras_internals.single_device_updates(optimizer):
                    optimizer.build(variables)
        updated_variables = [variable for call in applications for variable in call.variables]
        metrics = KerasMetrics(model).variables
        placement.place([*model.variables, *metrics, *updated_variables], [call.optimizer for call in applications])
        synchronized_ids = validation.statistics_of_all_replicas(model)
        self._statistics = [v for v in keras_internals.moving_statistics(model) if id(v) not in synchronized_ids]
        self._sparse = frozenset() if strategy.sums_gradients else sparse_gradient_names(model)
        compression = _compression(options)
        self._reductions = []
        for _, gradients, variables, _ in applications:
            pairs = zip(gradients, variables, strict=True)
            specs = [tf.TensorSpec(v.shape, v.dtype, v.path) for gradient, v in pairs if gradient is not None]
            self._reductions.append(Reduction(compression.reducer(specs, {}, self._sparse), specs, self._store))

    def set_reduce_ops(self, reduce_ops: ReduceOps) -> None:
        """Sets how to combine the values of replicas; called once, before `run`."""
        self._set_reduce_ops(reduce_ops)
        averaged_ids = {id(variable) for variable in reduce_ops.statistics}
        self._averaged_statistics = [variable for variable in self._statistics if id(variable) in averaged_ids]

    def run(self, batches: Any, max_steps: int, first_step: int) -> StepsResult:
        """See `TrainerSteps.run`."""
        steps, logs = self._run_batches(batches, max_steps, first_step), self._read_logs()
        name = next((name for name, value in logs.items() if not np.all(np.isfinite(value))), None)
        if name is None:
            return StepsResult(steps, logs, self.outputs.sources)
        failure = f"train_step returned a non-finite value at step {first_step + steps - 1}: {name}={logs[name]}."
        return StepsResult(steps, logs, failure=NotFiniteError(failure))

    def _make_apply(
        self,
        weights: Mapping[ReduceOp, tf.Tensor],
        collectives: Collectives,
        totals: Sequence[tf.Tensor] | None = None,
    ) -> Apply:
        """See base class."""
        counter = itertools.count()

        def apply(optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
            index = next(counter)
            reduction = self._reductions[index]
            pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
            weight = weights[self._reduce_ops.gradients[index] if self._reduce_ops.gradients else "mean"]
            gradients = [g if v.path in self._sparse else to_dense(g, v) for g, v in pairs]
            weighted_gradients = [_weighted(gradient, weight) for gradient in gradients]
            state, updated_variables = reduction.state(), [variable for _, variable in pairs]
            if totals is not None:
                reduction_result = ReductionResult(list(totals), list(totals), state, list(totals))
            else:
                reduction_result = reduction.reduce(weighted_gradients, collectives, name=f"gradients/{index}")
            with replica_context(None):  # the model's code ends here
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                    is_finite = reduction_result.all_finite()
                    self._apply_scaled(optimizer, reduction_result.totals, updated_variables, is_finite)
                    reduction_result = reduction_result._replace(state=select(is_finite, reduction_result.state, state))
                else:
                    self._apply(optimizer, reduction_result.totals, updated_variables)
            reduction.assign(reduction_result.state)

        return apply

    def _apply(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> None:
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


class EvaluationSteps(_ModelSteps):
    """Keras's own `test_step` or a custom one."""

    _name = "test_step"

    def __init__(
        self, model: keras.Model, strategy: Strategy, options: RunConfig, reduce_ops: ReduceOps, outputs: StepOutputs
    ):
        random_scope = functools.partial(randomness.inference_random_scope, purpose="evaluate")
        super().__init__(model, strategy, strategy.collectives, random_scope, options.seed)
        self.outputs = outputs
        self._set_reduce_ops(reduce_ops)
        self._next_index = 0  # index of the next batch, for the seeds of random layers

    def run(self, batches: Any, max_steps: int) -> StepsResult:
        """Evaluates up to `max_steps` batches of a `BatchReader`, or the batch of a `ReplicaRows`."""
        first_index = self._next_index
        if not self._next_index and isinstance(batches, BatchReader):
            # Only the trace shows whether the step sends rows, whose number may change from step to step.
            self._next_index += self._run_batches(next(batches), 1, self._next_index)
        steps = self._next_index - first_index
        if not steps or not (max_steps == 1 or batches.is_at_end):
            self._next_index += self._run_batches(batches, max_steps - steps, self._next_index)
        return StepsResult(self._next_index - first_index, self._read_logs(), self.outputs.sources)


def _settings(model: keras.Model, strategy: Strategy, options: RunConfig) -> Settings:
    clip = Clip(norm=options.clip_norm, value=options.clip_value)
    optimizer, optimizer_loss_scale = validation.unwrap_loss_scale(model.optimizer)
    validation.check_optimizer(optimizer, clip)
    validation.check_micro_steps(model, strategy, options.accumulate_steps)
    return Settings(
        batch_size=None,
        seed=options.seed,
        jit_compile=options.jit_compile
        or (strategy.training_shares[1] == 1 and not strategy.sums_gradients and bool(model.jit_compile)),
        micro_steps=options.accumulate_steps,
        clip=clip,
        loss_scale=parse_loss_scale(options.loss_scale) or optimizer_loss_scale or validation.default_loss_scale(model),
        max_skipped_steps=options.max_skipped_steps,
    )


def _compression(options: RunConfig) -> Compression:
    settings = Compression(
        methods=options.compression,
        min_bytes=options.compression_min_bytes,
        bucket_bytes=int(options.bucket_mb * 2**20),
        bucket_order=options.bucket_order,
    )
    if settings.choice:
        raise InputError(
            "--compression=auto is supported only by tfdist's own trainer. Received: "
            f"--compression={options.compression}. Specify a method, or use `tfdist train`."
        )
    return settings
