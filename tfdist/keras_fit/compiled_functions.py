"""The functions of one compilation of a model: training, evaluation and prediction on replicas, and logs."""

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
from tfdist.keras_fit.partitioned_step import communication, log_partitioned
from tfdist.keras_fit.placement import Placement
from tfdist.keras_fit.step_labels import ReduceOps, per_row_state, reduce_ops
from tfdist.keras_fit.step_outputs import Returned, inspect_step
from tfdist.keras_fit.training_steps import CustomSteps, EvaluationSteps, StepsResult, TrainerSteps
from tfdist.row_semantics.explanation import Communication, Explanation, listener
from tfdist.step.averaged_values import averaged_statistics
from tfdist.step.compression import Compression
from tfdist.step.metrics import KerasMetrics
from tfdist.step.state_store import StateStore
from tfdist.synchronization import WeightSynchronizer
from tfdist.synchronization.catalog import make_synchronizer

_numbers = itertools.count()
_STEP_METHODS = ("train_step", "compute_loss", "compute_metrics")  # methods that a model may override


class Functions:
    """The functions of a compiled and built model.

    Attributes:
      sums: sums of the metrics' variables since their last reset.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, options: RunConfig, placement: Placement):
        """Creates the state that the functions share.

        Args:
          model: compiled and built model.
          strategy: strategy on which it runs.
          options: options for its gradients and layers.
          placement: places variables as the strategy requires.
        """
        self.model, self._strategy, self._options, self._placement = model, strategy, options, placement
        self.sums = MetricSums(model, strategy)
        self._synchronizer: WeightSynchronizer | None = None
        self._failed = False
        self._per_row_state = per_row_state(model)
        # Which steps these are is decided with the first batch.
        self._training: TrainerSteps | CustomSteps | None = None
        self._tests: EvaluationSteps | None = None
        self._set_statistics()

    def prepare_training(self) -> None:
        """Gives the optimizer's state to who holds it; before the first step, since callbacks may read and assign it."""
        if self._synchronizer is None:
            self._strategy.optimizer_shards.build(self.model)
            clip = Clip(norm=self._options.clip_norm, value=self._options.clip_value)
            store = StateStore(self._strategy)
            self._synchronizer = make_synchronizer(EveryStep(), self.model, self._strategy, Compression(), store, clip)

    def _set_statistics(self) -> None:
        """Finds the model's moving statistics; tracing a custom step may create some."""
        self.average_statistics = averaged_statistics(self.model, self._strategy).assign

    def _add_created_metrics(self) -> None:
        """Finds metrics that tracing a custom step has created; without any, the sums of the metrics are kept."""
        if self.sums.add_created():
            self._set_statistics()
            self._failed = False

    def train(self, batches: Any, spec: Any, max_steps: int, number: int, allows_not_finite: bool) -> StepsResult:
        """Runs training steps.

        Args:
          batches: a `BatchReader`, or a `ReplicaRows` for `Strategy.run`.
          spec: structure of `tf.TensorSpec` of a batch.
          max_steps: maximum number of steps; fewer if the pass over the data ends before.
          number: number of the first step.
          allows_not_finite: whether to return after a step that is not finite, instead of raising.
        """
        self.sums.prepare_step()
        if self._training is None:
            result = self._first_steps(batches, spec, max_steps, number)
        else:
            self.sums.use_all_rows(self._training.needs_all_rows)
            result = self._training.run(batches, max_steps, number)
        if result.sums:
            self.sums.add(result.sums)
        if result.failure and not allows_not_finite:
            raise result.failure
        self._failed = self._failed or result.failure is not None
        return result

    def forget_training_steps(self) -> None:
        """Traces the training steps again at the next step: weights may be frozen now, for example.

        Metrics, the optimizer and its loss scale are kept; the error feedback of a compression is not.
        """
        self.sums.publish()
        self.keep_loss_scale()
        self._training = None

    def forget_tests(self) -> None:
        """Traces the evaluation of a batch again at the next one."""
        if self._tests is not None:
            self._tests.compile()

    def _first_steps(self, batches: Any, spec: Any, max_steps: int, number: int) -> StepsResult:
        """Runs the first steps, as the labels of the model's step require."""
        overridden = [name for name in _STEP_METHODS if keras_internals.is_overridden(self.model, name)]
        self._check_servers(overridden[0] if overridden else "")
        custom = self._custom_steps(spec) if overridden else None
        first = next(batches) if custom and isinstance(batches, BatchReader) else None
        needs_all_rows = "" if first is None else self._row_mismatch(first)
        ops = self._reduce_ops("train_step", custom.returned if custom else None, spec, needs_all_rows)
        assert self._synchronizer
        if custom is None and ops.are_means:
            self._training = TrainerSteps(
                self.model, self._strategy, self._options, self.sums.metrics, self._synchronizer, ops.statistics
            )
        else:
            self._check_servers(ops.needs_all_rows or "a sum over rows")
            self._training = custom or self._custom_steps(spec)
            self._training.set_reduce_ops(ops)
        self.sums.use_all_rows(self._training.needs_all_rows)
        sends_rows = bool(ops.calls) or isinstance(self._training, CustomSteps)
        if not (sends_rows and isinstance(batches, BatchReader)):
            return self._training.run(batches, max_steps, number)
        # Only tracing the step shows whether it sends rows, whose number may differ in the next step.
        result = self._training.run(next(batches) if first is None else first, 1, number)
        if max_steps == 1 or result.failure or batches.at_end:
            return result
        more = self.train(batches, spec, max_steps - 1, number + 1, allows_not_finite=True)
        return more._replace(steps=result.steps + more.steps)

    def _check_servers(self, received: str) -> None:
        """Raises `InputError` if gradients that a step applies itself would have to be updates of parameter servers."""
        if self._strategy.remote and received:
            raise InputError(
                "Parameter servers need Keras's own train_step, and a loss that is a mean over rows if several workers share a "
                f"batch. Received: {self.model.name}, and in it {received}. Use compile(loss=..., metrics=...) and add_loss, "
                "--staleness=async, or another strategy."
            )

    def _row_mismatch(self, batch: Any) -> str:
        """Describes tensors of a batch with other numbers of rows, such as labeled and unlabeled ones; empty for none."""
        lengths = [[int(count) for count in self._strategy.local(counts)] for counts in batch.counts]
        all_lengths = self._strategy.peers.gather(f"rows of tensors/{next(_numbers)}", lengths, TRACING_SECONDS)
        totals = {sum(count for own in counts for count in own) for counts in zip(*all_lengths, strict=True)}
        return f"its tensors have {' and '.join(map(str, sorted(totals)))} rows" if len(totals) > 1 else ""

    def _reduce_ops(self, name: str, returned: Returned | None, spec: Any, needs_all_rows: str = "") -> ReduceOps:
        """Returns how the replicas' values are combined; says so if a step needs all rows of a batch.

        Args:
          name: name of the model's step.
          returned: description of what the step returns; None for Keras's own step, which returns results of metrics.
          spec: structure of `tf.TensorSpec` of a batch.
          needs_all_rows: why each replica must compute the whole batch, if that is known.
        """
        shares = self._strategy.training_shares[1] if name == "train_step" else self._strategy.replicas
        has_all_rows = shares * self._options.accumulate_steps == 1
        if has_all_rows and not listener():  # Keras's own code is correct for all rows
            return ReduceOps(needs_all_rows="metrics" if returned and returned.computed_from_metrics else "")
        if needs_all_rows or self._per_row_state:
            ops = ReduceOps(needs_all_rows=needs_all_rows or self._per_row_state)
        elif returned and returned.computed_from_metrics:
            # A metric's sum since its reset is available only on a replica that has all rows.
            reason = f'"{returned.computed_from_metrics[0]}" is computed from a metric\'s result'
            ops = ReduceOps(needs_all_rows=reason)
        else:
            ops = reduce_ops(self.model, getattr(self.model, name), spec, returned.sources if returned else None)
        is_refused = needs_all_rows or self._per_row_state
        communicated = Communication(refused="its rows belong together" if is_refused else "")
        if ops.needs_all_rows and not communicated.refused:
            communicated = communication(self.model, getattr(self.model, name), spec)
        if callback := listener():
            step, trained = f"{name} of {self.model.name}", self.model.trainable_variables
            follows = (communicated.otherwise, trained, ops.calls, communicated, ops.without_rule)
            callback(Explanation(step, ops.values, ops.needs_all_rows, *follows))
        if ops.needs_all_rows:
            log_partitioned(self.model, name, ops.needs_all_rows, communicated, self._strategy, self._options.rows)
        partitioned = bool(ops.needs_all_rows and not communicated.refused)
        return ops._replace(partitioned=partitioned, static_rows=static_rows(spec))

    def _custom_steps(self, spec: Any) -> CustomSteps:
        result = CustomSteps(self.model, self._strategy, self._options, spec, self._placement)
        self._add_created_metrics()
        return result

    def test(self, batches: Any, spec: Any, max_steps: int) -> StepsResult:
        """Evaluates batches; see `train` for arguments and result."""
        self.sums.prepare_step()
        if self._tests is None:
            self._tests = self._evaluation_steps(spec)
        self.sums.use_all_rows(self._tests.needs_all_rows)
        return self._tests.run(batches, max_steps)

    def _evaluation_steps(self, spec: Any) -> EvaluationSteps:
        """Traces the test step and derives how values are combined."""
        returned = None
        if any(keras_internals.is_overridden(self.model, name) for name in ("test_step", "compute_metrics")):
            returned = inspect_step(self.model, self.model.test_step, spec)
            self._placement.place([*self.model.variables, *KerasMetrics(self.model).variables])
            self._add_created_metrics()
        ops = self._reduce_ops("test_step", returned, spec)
        return EvaluationSteps(self.model, self._strategy, self._options, self.sums, ops, returned or Returned())

    def keep_loss_scale(self) -> None:
        """Copies the loss scale to where Keras stores and saves it."""
        scale, optimizer = self._training.loss_scale if self._training else None, self.model.optimizer
        if scale is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.dynamic_scale.assign(scale)

    def results(self) -> dict[str, Any]:
        """Returns the metrics' results since their last reset, which the metrics themselves have until the next step."""
        self.sums.publish()
        return self._results()

    def _results(self) -> dict[str, Any]:
        results = self.sums.results()
        return results | {"loss": float("nan")} if self._failed else results

    def logs(self, result: "StepsResult", ends: bool) -> dict[str, Any]:
        """Returns the logs after steps: the metrics' results, or what a custom step returned.

        Args:
          result: the steps.
          ends: whether they end a pass, after which users read results from the metrics themselves.
        """
        if ends:
            self.sums.publish()
        if result.failure:
            return {**self._results(), **result.returned}
        if not result.returned:
            return self._results()
        by_metric = self.sums.by_metric()
        return {name: by_metric.get(result.sources.get(name, ""), value) for name, value in result.returned.items()}

    def reset_metrics(self) -> None:
        """Resets the metrics."""
        self.sums.reset()
        self._failed = False
