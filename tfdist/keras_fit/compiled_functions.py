"""Runs the training and evaluation steps of a compiled model on replicas, and returns its logs."""

import dataclasses
import itertools
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.collectives.trace_check import TRACING_SECONDS
from tfdist.config.job_config import RunConfig
from tfdist.config.sync import EveryStep
from tfdist.data.batches import static_rows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Clip
from tfdist.keras_fit.batch_readers import BatchReader
from tfdist.keras_fit.metric_sums import MetricSums
from tfdist.keras_fit.partitioned_step import communication
from tfdist.keras_fit.placement import Placement
from tfdist.keras_fit.step_labels import ReduceOps, per_row_state, reduce_ops
from tfdist.keras_fit.step_outputs import StepOutputs, inspect_step
from tfdist.keras_fit.training_steps import CustomSteps, EvaluationSteps, StepsResult, TrainerSteps
from tfdist.row_semantics.explanation import Communication, Explanation, listener
from tfdist.step.compression import Compression
from tfdist.step.layer_state import averaged_statistics
from tfdist.step.metrics import KerasMetrics
from tfdist.step.row_dependence import communicates, log_dependence, log_no_effect
from tfdist.step.state_store import StateStore
from tfdist.synchronization import WeightSynchronizer
from tfdist.synchronization.catalog import make_synchronizer

_gather_numbers = itertools.count()
_STEP_METHODS = ("train_step", "compute_loss", "compute_metrics")  # methods that a model may override


class CompiledFunctions:
    """The training and evaluation functions of a compiled and built model, and its metrics."""

    def __init__(self, model: keras.Model, strategy: Strategy, options: RunConfig, placement: Placement):
        self.model, self._strategy, self._options, self._placement = model, strategy, options, placement
        self.sums = MetricSums(model, strategy)  # since the last reset of the metrics
        self._synchronizer: WeightSynchronizer | None = None
        self._has_failed = False
        self._per_row_state = per_row_state(model)
        # Determined with the first batch.
        self._training: TrainerSteps | CustomSteps | None = None
        self._evaluation: EvaluationSteps | None = None
        self._set_statistics()

    def prepare_training(self) -> None:
        """Creates the optimizer's state before the first step, because callbacks may read and assign it."""
        if self._synchronizer is None:
            self._strategy.optimizer_shards.build(self.model)
            clip = Clip(norm=self._options.clip_norm, value=self._options.clip_value)
            store = StateStore(self._strategy)
            self._synchronizer = make_synchronizer(EveryStep(), self.model, self._strategy, Compression(), store, clip)

    def _set_statistics(self) -> None:
        """Collects the model's moving statistics, which may be created while a custom step is traced."""
        self.average_statistics = averaged_statistics(self.model, self._strategy).assign

    def _add_new_metrics(self) -> None:
        """Adds metrics that were created while a custom step was traced, and resets the sums if there are any."""
        if self.sums.add_new_metrics():
            self._set_statistics()
            self._has_failed = False

    def train(self, batches: Any, spec: Any, max_steps: int, first_step: int, allows_not_finite: bool) -> StepsResult:
        """Runs up to `max_steps` training steps of a `BatchReader`, or one of a `ReplicaRows` for `Strategy.run`.

        `spec` is a structure of `tf.TensorSpec` of a batch, and `first_step` is the index of the first step. With
        `allows_not_finite`, the failure of a step whose loss is not finite is returned instead of raised.
        """
        self.sums.prepare_step()
        if self._training is None:
            result = self._run_first_steps(batches, spec, max_steps, first_step)
        else:
            self.sums.use_all_rows(self._training.needs_all_rows)
            result = self._training.run(batches, max_steps, first_step)
        if result.sums:
            self.sums.add(result.sums)
        if result.failure and not allows_not_finite:
            raise result.failure
        self._has_failed = self._has_failed or result.failure is not None
        return result

    def forget_training_steps(self) -> None:
        """Causes the training step to be traced again, for example after weights were frozen.

        Keeps metrics, the optimizer and its loss scale, but not the error feedback of gradient compression.
        """
        self.sums.publish()
        self.keep_loss_scale()
        self._training = None

    def forget_evaluation_steps(self) -> None:
        """Causes the evaluation step to be traced again."""
        if self._evaluation is not None:
            self._evaluation.compile()

    def _run_first_steps(self, batches: Any, spec: Any, max_steps: int, first_step: int) -> StepsResult:
        overridden_methods = [name for name in _STEP_METHODS if keras_internals.is_overridden(self.model, name)]
        self._check_servers(overridden_methods[0] if overridden_methods else "")
        custom_steps = self._custom_steps(spec) if overridden_methods else None
        first_batch = next(batches) if custom_steps and isinstance(batches, BatchReader) else None
        needs_all_rows = "" if first_batch is None else self._row_mismatch(first_batch)
        ops = self._reduce_ops("train_step", custom_steps.outputs if custom_steps else None, spec, needs_all_rows)
        assert self._synchronizer
        if custom_steps is None and (ops.are_means or self._strategy.replicas == 1):
            arguments = self.model, self._strategy, self._options, self.sums.metrics, self._synchronizer, ops
            self._training = TrainerSteps(*arguments)
        else:
            self._check_servers(ops.needs_all_rows or "a sum over rows")
            self._training = custom_steps or self._custom_steps(spec)
            self._training.set_reduce_ops(ops)
        self.sums.use_all_rows(self._training.needs_all_rows)
        sends_rows = bool(ops.calls) or isinstance(self._training, CustomSteps)
        if not (sends_rows and isinstance(batches, BatchReader)):
            return self._training.run(batches, max_steps, first_step)
        # Only the trace shows whether the step sends rows, whose number may change from step to step.
        result = self._training.run(next(batches) if first_batch is None else first_batch, 1, first_step)
        if max_steps == 1 or result.failure or batches.is_at_end:
            return result
        next_result = self.train(batches, spec, max_steps - 1, first_step + 1, allows_not_finite=True)
        return next_result._replace(steps=result.steps + next_result.steps)

    def _check_servers(self, received: str) -> None:
        """Raises `InputError` if parameter servers would have to apply the gradients of `received`, a part of a step."""
        if self._strategy.remote and received:
            raise InputError(
                "Parameter servers need Keras's own train_step and, if several workers share a batch, a loss that is a mean "
                f"over rows. Received: {self.model.name}: {received}. Use compile(loss=..., metrics=...) and add_loss, "
                "--staleness=async, or another strategy."
            )

    def _row_mismatch(self, batch: Any) -> str:
        """Describes different numbers of rows of a batch's tensors, such as labeled and unlabeled ones; "" if equal."""
        lengths = [sum(int(count) for count in self._strategy.local(counts)) for counts in batch.counts]
        all_lengths = self._strategy.peers.gather(f"rows of tensors/{next(_gather_numbers)}", lengths, TRACING_SECONDS)
        totals = {sum(counts) for counts in zip(*all_lengths, strict=True)}
        return f"its tensors have {' and '.join(map(str, sorted(totals)))} rows" if len(totals) > 1 else ""

    def _reduce_ops(self, name: str, outputs: StepOutputs | None, spec: Any, needs_all_rows: str = "") -> ReduceOps:
        """Returns how to combine the values of replicas; logs if a step needs all rows of a batch.

        `outputs` is None for Keras's own step, which returns results of metrics. `needs_all_rows` is the reason why each
        replica must compute the whole batch; empty if no reason is known yet.
        """
        shares = self._strategy.training_shares[1] if name == "train_step" else self._strategy.replicas
        if shares * self._options.accumulate_steps == 1 and not listener():  # Keras's own code is correct for all rows
            # The value of a metric may not be a sum over batches, or a step may read its sum since its last reset.
            is_one_device = self._strategy.replicas == 1 and not self._strategy.remote
            has_custom_metrics = is_one_device and bool(keras_internals.custom_metrics(self.model))
            is_read = outputs is not None and bool(outputs.computed_from_metrics)
            return ReduceOps(needs_all_rows="metrics" if has_custom_metrics or is_read else "")
        if needs_all_rows or self._per_row_state:
            ops = ReduceOps(needs_all_rows=needs_all_rows or self._per_row_state)
        elif outputs and outputs.computed_from_metrics:
            # A metric's sum since its reset is available only on a replica that has all rows.
            name_of_output = outputs.computed_from_metrics[0]
            ops = ReduceOps(needs_all_rows=f'"{name_of_output}" is computed from a metric\'s result')
        else:
            ops = reduce_ops(self.model, getattr(self.model, name), spec, outputs.sources if outputs else None)
        micro_steps = self._options.accumulate_steps if name == "train_step" and outputs is None else 1
        if micro_steps > 1 and (not ops.are_means or communicates(ops.calls)):
            reason = ops.needs_all_rows or "values of rows are summed or gathered"
            log_no_effect(f"--accumulate_steps={micro_steps}", self.model, reason, self._strategy)
            self._options = dataclasses.replace(self._options, accumulate_steps=1)
            return self._reduce_ops(name, outputs, spec, needs_all_rows)
        cannot_partition = needs_all_rows or self._per_row_state
        plan = Communication(obstacle="its rows cannot be divided among replicas" if cannot_partition else "")
        if ops.needs_all_rows and not plan.obstacle:
            plan = communication(self.model, getattr(self.model, name), spec)
        if callback := listener():
            details = plan.fallback, self.model.trainable_variables, ops.calls, plan, ops.types_without_rule
            callback(Explanation(f"{name} of {self.model.name}", ops.values, ops.needs_all_rows, *details))
        if ops.needs_all_rows:
            log_dependence(self.model, name, ops.needs_all_rows, plan, self._strategy, self._options.rows)
        is_partitioned = bool(ops.needs_all_rows and not plan.obstacle)
        return ops._replace(is_partitioned=is_partitioned, static_rows=static_rows(spec))

    def _custom_steps(self, spec: Any) -> CustomSteps:
        result = CustomSteps(self.model, self._strategy, self._options, spec, self._placement)
        self._add_new_metrics()
        return result

    def test(self, batches: Any, spec: Any, max_steps: int) -> StepsResult:
        """Evaluates batches; see `train` for arguments and result."""
        self.sums.prepare_step()
        if self._evaluation is None:
            self._evaluation = self._evaluation_steps(spec)
        self.sums.use_all_rows(self._evaluation.needs_all_rows)
        return self._evaluation.run(batches, max_steps)

    def _evaluation_steps(self, spec: Any) -> EvaluationSteps:
        outputs = None
        if any(keras_internals.is_overridden(self.model, name) for name in ("test_step", "compute_metrics")):
            outputs = inspect_step(self.model, self.model.test_step, spec)
            self._placement.place([*self.model.variables, *KerasMetrics(self.model).variables])
            self._add_new_metrics()
        ops = self._reduce_ops("test_step", outputs, spec)
        return EvaluationSteps(self.model, self._strategy, self._options, ops, outputs or StepOutputs())

    def keep_loss_scale(self) -> None:
        """Copies the loss scale to Keras's variable."""
        scale, optimizer = self._training.loss_scale if self._training else None, self.model.optimizer
        if scale is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.dynamic_scale.assign(scale)

    def results(self) -> dict[str, Any]:
        """Publishes and returns the metrics' results since their last reset."""
        self.sums.publish()
        return self._results()

    def _results(self) -> dict[str, Any]:
        results = self.sums.results()
        return results | {"loss": float("nan")} if self._has_failed else results

    def logs(self, result: "StepsResult", ends_pass: bool) -> dict[str, Any]:
        """Returns the logs after steps: the metrics' results, or the outputs of a custom step.

        If the steps end a pass, the results are also published, because users read them from the metrics after a pass.
        """
        if ends_pass:
            self.sums.publish()
        if result.failure:
            return {**self._results(), **result.outputs}
        if not result.outputs:
            return self._results()
        by_metric = self.sums.by_metric()
        return {name: by_metric.get(result.sources.get(name, ""), value) for name, value in result.outputs.items()}

    def reset_metrics(self) -> None:
        """Resets the metrics."""
        self.sums.reset()
        self._has_failed = False
