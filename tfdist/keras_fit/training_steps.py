"""Training and evaluation steps of Keras's methods on replicas, and their loops."""

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
from tfdist.collectives import Collectives, Recording, using
from tfdist.collectives.differentiable import loss_weight_scope
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.config.job_config import RunConfig
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, NotFiniteError, with_argument_names
from tfdist.gradients import Clip, LossScale, ReductionResult, parse_loss_scale, unscale
from tfdist.keras_fit.batch_readers import BatchReader
from tfdist.keras_fit.metric_sums import MetricSums
from tfdist.keras_fit.one_device import Apply, replica_context
from tfdist.keras_fit.partitioned_step import Application, batch_for_replica, equal_value_weights, run_partitioned
from tfdist.keras_fit.placement import Placement
from tfdist.keras_fit.step_labels import ReduceOps
from tfdist.keras_fit.step_outputs import Logs, ReduceOp, StepOutputs, inspect_step
from tfdist.parameter_server.keyed_rows import keyed_layers
from tfdist.reporting.warn_once import warn_once
from tfdist.step import randomness
from tfdist.step.compiled_loop import compile_loop, compile_single_step, make_host_loop, not_finite_error
from tfdist.step.compiled_steps import Steps
from tfdist.step.compression import Compression
from tfdist.step.gradient_source import to_dense
from tfdist.step.layer_state import assign, average_over_rows, refuse_shared_variables, restore_unless, select
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import KerasMetrics
from tfdist.step.reduction import Reduction, global_norm
from tfdist.step.settings import Settings, sparse_gradient_names
from tfdist.step.state_store import StateStore
from tfdist.step.validation import (
    check_micro_steps,
    check_not_wrapped,
    check_optimizer,
    default_loss_scale,
    inner_optimizer,
    statistics_of_all_replicas,
    unwrap_loss_scale,
)
from tfdist.synchronization import WeightSynchronizer

ReplicaFunction = Callable[[Any, tf.Tensor], None]  # (`ReplicaRows`, number of the step, scalar int64) -> None


class ReplicaLoops:
    """Runs a replica function for batches; all processes call `on_trace` after its first trace, before it runs."""

    def __init__(self, strategy: Strategy, function: ReplicaFunction, on_trace: Callable[[], None]):
        self._call = _compile_call(strategy, function, on_trace)
        self._loop = _compile_loop(strategy, function, on_trace) if strategy.compiles_loops else None

    def run(self, batches: Any, max_steps: int, first_step: int, *, separate_calls: bool) -> int:
        """Runs the function for one batch, or for up to `max_steps` batches of a `BatchReader`; returns the number of batches.

        Args:
          batches: a `BatchReader`, or a `ReplicaRows` for `Strategy.run`.
          max_steps: maximum number of batches.
          first_step: number of the first step.
          separate_calls: whether to make a call for each batch, because shapes of communicated tensors may differ between
            batches: TensorFlow's collectives between processes do not support this within one call of a compiled function.

        Raises:
          StopIteration: there are fewer batches.
        """
        if not isinstance(batches, BatchReader):
            self._call(batches, first_step)
            return 1
        steps = batches.next_count(max_steps)
        if self._loop is None or separate_calls:
            for number in range(first_step, first_step + steps):
                self._call(next(batches), number)
        else:
            self._loop(batches.rows, first_step, steps)
            batches.advance(steps)
        return steps


def _compile_loop(
    strategy: Strategy, function: ReplicaFunction, on_trace: Callable[[], None]
) -> Callable[[Iterator[Any], int, int], None]:
    on_first_trace = functools.cache(on_trace)

    def run_step(batch: Any, step: tf.Tensor) -> None:
        # If the data ends unexpectedly, no part of the step may run, not even parts that do not depend on the data.
        with tf.control_dependencies(
            [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
        ):
            function(batch, step)

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(rows: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor) -> None:
        def body(index: tf.Tensor) -> tf.Tensor:
            strategy.run(run_step, next(rows), first_step + tf.cast(index, tf.int64))
            on_first_trace()
            return index + 1

        tf.while_loop(lambda index: index < steps, body, (tf.constant(0),), parallel_iterations=1)

    return lambda rows, first_step, steps: loop(rows, tf.constant(first_step, tf.int64), tf.constant(steps))


def _compile_call(
    strategy: Strategy, function: ReplicaFunction, on_trace: Callable[[], None]
) -> Callable[[Any, int], None]:
    on_first_trace = functools.cache(on_trace)

    def run(batch: Any, step: tf.Tensor) -> None:
        strategy.run(function, batch, tf.cast(step, tf.int64))
        on_first_trace()

    step_function = strategy.compiled(run)
    # DTensor treats a small int64 as a compile-time constant, and recompiles the program when it changes.
    return lambda batch, step: step_function(batch, tf.constant(step, tf.uint64))


class StepsResult(NamedTuple):
    """The result of several steps.

    Attributes:
      steps: number of completed steps.
      outputs: outputs of the last step, if it is a custom one.
      sources: metrics, see `KerasMetrics.by_metric`, by the names of outputs that are their results.
      failure: error to raise if the last step was not finite.
      sums: sums of the metrics' variables over replicas, if the call has drained them.
    """

    steps: int
    outputs: Mapping[str, Any] = {}
    sources: Mapping[str, str] = {}
    failure: NotFiniteError | None = None
    sums: Sequence[tf.Tensor] = ()


class TrainerSteps:
    """The trainer's step, for a model with Keras's own steps.

    Attributes:
      needs_all_rows: whether metrics are kept from batch to batch, on one replica.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        options: RunConfig,
        metrics: KerasMetrics,
        synchronizer: WeightSynchronizer,
        averaged_variables: Sequence[keras.Variable] = (),
        keeps_metrics: bool = False,
    ):
        self.needs_all_rows = keeps_metrics
        settings = dataclasses.replace(
            _settings(model, strategy, options), averaged_statistics=tuple(averaged_variables)
        )
        if not model.trainable_variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)  # as in Keras
        self._store = StateStore(strategy)
        if settings.loss_scale:
            self._store.variables(settings.loss_scale.state())
        self._has_loss_scale = settings.loss_scale is not None
        self._model, self._synchronizer = model, synchronizer
        self._steps = Steps(model, strategy, settings, _compression(options), self._store, metrics)
        self._compile_one_step = functools.partial(compile_single_step, metrics)
        if strategy.is_chief and (text := self._steps.idle_compression):
            warn_once(with_argument_names(text))

    def run(self, batches: Any, max_steps: int, number: int) -> StepsResult:
        """Runs up to `max_steps` steps of a `BatchReader`, or one of a `ReplicaRows`; `number` is that of the first step."""
        is_reader = isinstance(batches, BatchReader)
        if is_reader and self._steps.sends_rows:
            return self._run_separately(batches, batches.next_count(max_steps), number)
        steps = batches.next_count(max_steps) if is_reader else 1
        compile_for = compile_loop if is_reader else make_host_loop
        if is_reader and max_steps == 1 and not self.needs_all_rows:
            compile_for = self._compile_one_step
        loop = self._synchronizer.loop(self._steps, None, 1.0, number, compile_for)
        rows = batches.rows if is_reader else iter([batches])
        result = loop(rows, tf.constant(number, tf.int64), tf.constant(steps), tf.constant(False))
        losses = result.losses.numpy()  # fewer than `steps` if one was not finite
        if is_reader:
            batches.advance(len(losses))
        if bool(result.may_continue):
            return StepsResult(len(losses), sums=result.sums)
        last_step, variables = number + len(losses) - 1, self._model.trainable_variables
        return StepsResult(
            len(losses), failure=not_finite_error(last_step, losses[-1], result, variables, self.loss_scale)
        )

    def _run_separately(self, batches: BatchReader, steps: int, number: int) -> StepsResult:
        for index in range(steps):
            result = self.run(next(batches), 1, number + index)
            if result.failure:
                return result._replace(steps=index + 1)
        return StepsResult(steps)

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None without loss scaling."""
        return float(self._store.array("loss_scale/scale").values) if self._has_loss_scale else None


class CustomSteps:
    """A custom `train_step` or `compute_loss` on each replica's rows, or Keras's own for a loss that is not a mean over rows.

    Gradients are summed over replicas, weighted by rows, where the step applies them, possibly several times; see
    `tfdist.keras_fit.one_device` for the assumptions about losses. A step that is not finite cannot be undone.

    Attributes:
      outputs: specification of the step's outputs.
      needs_all_rows: whether replicas compute the values of whole batches.
    """

    loss_scale = None
    needs_all_rows = False

    def __init__(self, model: keras.Model, strategy: Strategy, options: RunConfig, spec: Any, placement: Placement):
        """Traces the model's code with one batch, a structure of `tf.TensorSpec`, and places the variables that it creates."""
        settings = dataclasses.replace(
            _settings(model, strategy, options), loss_scale=parse_loss_scale(options.loss_scale)
        )
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
        self.outputs, self._store = outputs, StateStore(strategy)
        self._reduce_ops = ReduceOps()
        self._averaged_statistics: list[keras.Variable] = []
        self._sparse = frozenset() if strategy.sums_gradients else sparse_gradient_names(model)
        self._reductions = [
            _make_reduction(call, _compression(options), self._store, self._sparse) for call in applications
        ]
        self._loops = ReplicaLoops(strategy, self._run, self._check_trace)

    def set_reduce_ops(self, reduce_ops: ReduceOps) -> None:
        """Sets how to combine the values of replicas; called once, before `run`."""
        self._reduce_ops, self.needs_all_rows = reduce_ops, bool(reduce_ops.needs_all_rows)
        averaged_ids = {id(variable) for variable in reduce_ops.statistics}
        self._averaged_statistics = [variable for variable in self._statistics if id(variable) in averaged_ids]
        self._logs = Logs(self.outputs, self._strategy, self._store, "train_step", reduce_ops.logs)

    def run(self, batches: Any, max_steps: int, number: int) -> StepsResult:
        """Same as `TrainerSteps.run`."""
        # Only gradients have the same shapes in each step; tensors that the code sends may have other numbers of rows.
        calls = [call for call in self._recording.calls if not call.name.startswith("gradients/")]
        sends_rows = any(None in shape for call in calls for shape in call.shapes)
        steps = self._loops.run(batches, max_steps, number, separate_calls=sends_rows)
        logs = self._logs.read()
        name = next((name for name, value in logs.items() if not np.all(np.isfinite(value))), None)
        if name is None:
            return StepsResult(steps, logs, self._logs.sources)
        failure = f"train_step returned a value that is not finite at step {number + steps - 1}: {name}={logs[name]}."
        return StepsResult(steps, logs, failure=NotFiniteError(failure))

    def _run(self, own_rows: ReplicaRows, number: tf.Tensor) -> None:
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
        self._logs.store(logs, replica_batch.weights)
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
        self._logs.store(result.values, equal_value_weights(collectives))

    def _check_trace(self) -> None:
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


class EvaluationSteps:
    """Keras's own `test_step` or a custom one, on each replica's rows, on all rows, or partitioned.

    Attributes:
      needs_all_rows: whether replicas compute the values of whole batches.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        options: RunConfig,
        sums: MetricSums,
        reduce_ops: ReduceOps,
        outputs: StepOutputs,
    ):
        self._model, self._strategy, self._options, self._sums = model, strategy, options, sums
        self._reduce_ops, self.needs_all_rows = reduce_ops, bool(reduce_ops.needs_all_rows)
        self._logs = Logs(outputs, strategy, StateStore(strategy), "test_step", reduce_ops.logs)
        self._recording = Recording(strategy.collectives)
        self._number = 0  # number of the next batch, for the seeds of random layers
        self.compile()

    def compile(self) -> None:
        """Causes the next batch to trace the step again."""
        self._loops = ReplicaLoops(self._strategy, self._run, self._check_trace)

    def run(self, batches: Any, max_steps: int) -> StepsResult:
        """Evaluates up to `max_steps` batches of a `BatchReader`, or one `ReplicaRows`."""
        steps = 0
        if not self._number and isinstance(batches, BatchReader):
            # The trace of a step shows whether it sends rows, whose number may change from step to step.
            steps = self._run_batches(next(batches), 1)
        if not steps or not (max_steps == 1 or batches.is_at_end):
            steps += self._run_batches(batches, max_steps - steps)
        return StepsResult(steps, self._logs.read(), self._logs.sources)

    def _run_batches(self, batches: Any, max_steps: int) -> int:
        steps = self._loops.run(batches, max_steps, self._number, separate_calls=self._recording.has_unknown_shapes)
        self._number += steps
        return steps

    def _run(self, own_rows: ReplicaRows, number: tf.Tensor) -> None:
        variables, seeds = self._sums.metrics.variables, randomness.seed_states(self._model)
        previous_values = [tf.identity(variable) for variable in variables]
        self._recording = collectives = Recording(self._strategy.collectives)
        random_numbers = functools.partial(randomness.inference_draws, seeds, self._options.seed, "evaluate", number)
        layout_context = self._strategy.layouts.compute_layouts(self._model.trainable_variables)
        if self._reduce_ops.is_partitioned:
            with layout_context, random_numbers(collectives.rank, collectives.size):
                result, _ = run_partitioned(self._model, self._model.test_step, own_rows, collectives)
            result.assign()
            self._logs.store(result.values, equal_value_weights(collectives))
            return
        batch, weights, seed_replica, replica = batch_for_replica(
            own_rows, collectives, self.needs_all_rows, self._reduce_ops.static_rows
        )
        with layout_context, random_numbers(seed_replica, self._strategy.replicas), using(replica.collectives):
            with replica_context(replica), keras_internals.inline_functions():
                operations = keras_internals.count_operations()
                outputs = self._model.test_step(batch)
                refuse_shared_variables(self._model, self._strategy, operations)
        restore_unless(replica.rows > 0, variables, previous_values)
        self._logs.store(outputs, weights)

    def _check_trace(self) -> None:
        agree_on_plan(self._strategy.peers, self._recording.calls)


def _settings(model: keras.Model, strategy: Strategy, options: RunConfig) -> Settings:
    clip = Clip(norm=options.clip_norm, value=options.clip_value)
    optimizer, optimizer_loss_scale = unwrap_loss_scale(model.optimizer)
    check_optimizer(optimizer, clip)
    check_micro_steps(model, strategy, options.accumulate_steps)
    return Settings(
        batch_size=None,
        seed=options.seed,
        jit_compile=options.jit_compile
        or (strategy.training_shares[1] == 1 and not strategy.sums_gradients and bool(model.jit_compile)),
        micro_steps=options.accumulate_steps,
        clip=clip,
        loss_scale=parse_loss_scale(options.loss_scale) or optimizer_loss_scale or default_loss_scale(model),
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
            f"--compression={options.compression}. Name a method, or use `tfdist train`."
        )
    return settings
