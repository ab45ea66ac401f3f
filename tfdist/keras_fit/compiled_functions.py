"""The functions of one compilation of a model: training, evaluation and prediction on replicas, and logs."""

import contextlib
import itertools
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Recording, using
from tfdist.collectives.trace_check import TRACING_SECONDS, agree_on_plan
from tfdist.config.run_config import RunConfig
from tfdist.data.batches import static_rows
from tfdist.data.replica_rows import ReplicaRows
from tfdist.distribution.strategy import HasCollectives
from tfdist.keras_fit.batch_readers import BatchReader
from tfdist.keras_fit.custom_train_step import Place
from tfdist.keras_fit.metric_sums import MetricSums
from tfdist.keras_fit.one_device import running
from tfdist.keras_fit.partitioned_step import communication, partitioned, say_partitioned
from tfdist.keras_fit.replica_batch import of_equal_values, rows_of
from tfdist.keras_fit.replica_loops import once, one_at_a_time, repeated
from tfdist.keras_fit.step_labels import ReduceOps, reduce_ops, state_of_rows
from tfdist.keras_fit.step_outputs import Logs, Returned, inspect_step
from tfdist.keras_fit.training_steps import CustomSteps, StepsResult, TrainerSteps
from tfdist.row_semantics.explanation import Communication, Explanation, listener
from tfdist.step import randomness
from tfdist.step.metrics import KerasMetrics
from tfdist.step.plain_variables import check_none_is_assigned
from tfdist.step.side_effects import restore_unless
from tfdist.step.state_store import StateStore
from tfdist.step.temporary_values import averaged_statistics

_numbers = itertools.count()
_OF_A_STEP = ("train_step", "compute_loss", "compute_metrics")  # methods that a model may override


class Functions:
    """The functions of a compiled and built model.

    Attributes:
      sums: sums of the metrics' variables since their last reset.
    """

    def __init__(self, model: keras.Model, strategy: HasCollectives, options: RunConfig, place: Place):
        """Creates the state that the functions share.

        Args:
          model: compiled and built model.
          strategy: strategy on which it runs.
          options: options for its gradients and layers.
          place: places variables as the strategy requires.
        """
        self.model, self._strategy, self._options, self._place = model, strategy, options, place
        self.sums = MetricSums(model, strategy)
        self._find_variables()
        self._failed = False
        self._tested = 0  # number of batches, which seeds random layers
        self._training: TrainerSteps | CustomSteps | None = None
        self._own: CustomSteps | None = None
        self._state_of_rows = state_of_rows(model)
        self._recorded = Recording(strategy.collectives)
        self._test_logs: Logs | None = None
        self._test_reduce_ops = ReduceOps()
        self._tests = self._made_tests()

    def _find_variables(self) -> None:
        """Finds the model's random layers and moving statistics; tracing a custom step may create some."""
        self._seeds = randomness.seed_states(self.model)
        self.average_statistics = averaged_statistics(self.model, self._strategy).assign

    def _find_created_metrics(self) -> None:
        """Finds metrics that tracing a custom step has created; without any, the sums of the metrics are kept."""
        if self.sums.find_created():
            self._find_variables()
            self._failed = False

    def train(self, batches: Any, spec: Any, most: int, number: int, allows_not_finite: bool) -> StepsResult:
        """Runs training steps.

        Args:
          batches: a `BatchReader`, or a `ReplicaRows` for `Strategy.run`.
          spec: structure of `tf.TensorSpec` of a batch.
          most: maximum number of steps; fewer if the pass over the data ends before.
          number: number of the first step.
          allows_not_finite: whether to return after a step that is not finite, instead of raising.
        """
        self.sums.hide()
        if self._training is None:
            made = self._first(batches, spec, most, number)
        else:
            self.sums.use_all_rows(self._training.needs_all_rows)
            made = self._training.go(batches, most, number)
        if made.sums:
            self.sums.add(made.sums)
        if made.failure and not allows_not_finite:
            raise made.failure
        self._failed = self._failed or made.failure is not None
        return made

    def forget_training_steps(self) -> None:
        """Traces the training steps again at the next step: weights may be frozen now, for example.

        Metrics, the optimizer and its loss scale are kept; the error feedback of a compression is not.
        """
        self.sums.show()
        self.keep_loss_scale()
        self._training = self._own = None

    def forget_tests(self) -> None:
        """Traces the evaluation of a batch again at the next one."""
        self._tests = self._made_tests()

    def _first(self, batches: Any, spec: Any, most: int, number: int) -> StepsResult:
        """Runs the first steps, as the labels of the model's step require."""
        if self._own is None and any(keras_internals.overridden(self.model, name) for name in _OF_A_STEP):
            self._own = self._own_steps(spec)
        first = next(batches) if self._own is not None and isinstance(batches, BatchReader) else None
        needs_all_rows = "" if first is None else self._with_other_rows(first)
        ops = self._reduce_ops("train_step", self._own.returned if self._own else None, spec, needs_all_rows)
        self._training = self._following(ops, spec)
        self.sums.use_all_rows(self._training.needs_all_rows)
        sends_rows = bool(ops.calls) or isinstance(self._training, CustomSteps)
        if not (sends_rows and isinstance(batches, BatchReader)):
            return self._training.go(batches, most, number)
        # Whether a step sends rows, of which there may be other numbers in the next one, is known when it is traced.
        made = self._training.go(next(batches) if first is None else first, 1, number)
        if most == 1 or made.failure or batches.at_end:
            return made
        more = self.train(batches, spec, most - 1, number + 1, allows_not_finite=True)
        return more._replace(steps=made.steps + more.steps)

    def _with_other_rows(self, batch: Any) -> str:
        """Describes tensors of a batch with other numbers of rows, such as labeled and unlabeled ones; empty for none."""
        lengths = [[int(count) for count in self._strategy.local(counts)] for counts in batch.counts]
        everyone = self._strategy.peers.gather(f"rows of tensors/{next(_numbers)}", lengths, TRACING_SECONDS)
        totals = {sum(count for own in counts for count in own) for counts in zip(*everyone, strict=True)}
        return f"its tensors have {' and '.join(map(str, sorted(totals)))} rows" if len(totals) > 1 else ""

    def _reduce_ops(self, name: str, returned: Returned | None, spec: Any, needs_all_rows: str = "") -> ReduceOps:
        """Returns how the replicas' values are combined; says so if a step needs all rows of a batch.

        Args:
          name: name of the model's step.
          returned: description of what the step returns; None for Keras's own step, which returns results of metrics.
          spec: structure of `tf.TensorSpec` of a batch.
          needs_all_rows: why each replica must compute the whole batch, if that is known.
        """
        has_all_rows = self._strategy.replicas * self._options.accumulate_steps == 1
        if has_all_rows and not listener():  # for which Keras's own code is correct
            return ReduceOps(needs_all_rows="metrics" if returned and returned.computed_from_metrics else "")
        if needs_all_rows or self._state_of_rows:
            ops = ReduceOps(needs_all_rows=needs_all_rows or self._state_of_rows)
        elif returned and returned.computed_from_metrics:
            # A metric's sum since its reset is available only on a replica that has all rows.
            reason = f'"{returned.computed_from_metrics[0]}" is computed from a metric\'s result'
            ops = ReduceOps(needs_all_rows=reason)
        else:
            ops = reduce_ops(self.model, getattr(self.model, name), spec, returned.sources if returned else None)
        sent = Communication(refused="its rows belong together" if needs_all_rows or self._state_of_rows else "")
        if ops.needs_all_rows and not sent.refused:
            sent = communication(self.model, getattr(self.model, name), spec)
        if tell := listener():
            step, trained = f"{name} of {self.model.name}", self.model.trainable_variables
            follows = (sent.otherwise, trained, ops.calls, sent, ops.without_rule)
            tell(Explanation(step, ops.values, ops.needs_all_rows, *follows))
        if ops.needs_all_rows:
            say_partitioned(self.model, name, ops.needs_all_rows, sent, self._strategy, self._options.rows)
        partitioned = bool(ops.needs_all_rows and not sent.refused)
        return ops._replace(partitioned=partitioned, static_rows=static_rows(spec))

    def _following(self, ops: ReduceOps, spec: Any) -> TrainerSteps | CustomSteps:
        if self._own is None and ops.are_means:
            return TrainerSteps(self.model, self._strategy, self._options, self.sums.metrics, ops.statistics)
        made = self._own or self._own_steps(spec)
        made.set_reduce_ops(ops)
        return made

    def _own_steps(self, spec: Any) -> CustomSteps:
        made = CustomSteps(self.model, self._strategy, self._options, spec, self._place)
        self._find_created_metrics()
        return made

    def test(self, batches: Any, spec: Any, most: int) -> StepsResult:
        """Evaluates batches; see `train` for arguments and result."""
        self.sums.hide()
        begins = self._test_logs is None
        if begins:
            self._begin_tests(spec)
        self.sums.use_all_rows(self._tests_need_all_rows)
        if begins or not isinstance(batches, BatchReader):
            self._test_one(next(batches) if isinstance(batches, BatchReader) else batches)
            if most == 1 or not isinstance(batches, BatchReader) or batches.at_end:
                return self._found_by_test(1)
        steps, (repeatedly, once) = batches.ahead(most - begins), self._tests
        if self._recorded.has_unknown_shapes:
            one_at_a_time(once, batches, steps, self._tested)
        else:
            repeatedly(batches.rows, self._tested, steps)
            batches.took(steps)
        self._tested += steps
        return self._found_by_test(steps + begins)

    def _test_one(self, batch: Any) -> None:
        self._tests[1](batch, self._tested)
        self._tested += 1

    def _found_by_test(self, steps: int) -> StepsResult:
        assert self._test_logs is not None  # set when tests began
        return StepsResult(steps, self._test_logs.read(), self._test_logs.sources)

    @property
    def _tests_need_all_rows(self) -> bool:
        return bool(self._test_reduce_ops.needs_all_rows)

    def _begin_tests(self, spec: Any) -> None:
        """Traces the test step and derives how values are combined."""
        is_own = any(keras_internals.overridden(self.model, name) for name in ("test_step", "compute_metrics"))
        returned = self._looked_at_test(spec) if is_own else Returned()
        self._test_reduce_ops = self._reduce_ops("test_step", returned if is_own else None, spec)
        kept = StateStore(self._strategy)
        self._test_logs = Logs(returned, self._strategy, kept, "test_step", self._test_reduce_ops.logs)
        self._tests = self._made_tests()

    def _made_tests(self) -> tuple[Any, Any]:
        given = self._strategy, self._test, self._test_traced
        return repeated(*given), once(*given)

    def _looked_at_test(self, spec: Any) -> Returned:
        returned = inspect_step(self.model, self.model.test_step, spec)
        self._place([*self.model.variables, *KerasMetrics(self.model).variables])
        self._find_created_metrics()
        return returned

    def keep_loss_scale(self) -> None:
        """Copies the loss scale to where Keras stores and saves it."""
        scale, optimizer = self._training.loss_scale if self._training else None, self.model.optimizer
        if scale is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.dynamic_scale.assign(scale)

    def results(self) -> dict[str, Any]:
        """Returns the metrics' results since their last reset, which the metrics themselves have until the next step."""
        self.sums.show()
        return self._results()

    def _results(self) -> dict[str, Any]:
        found = self.sums.results()
        return found | {"loss": float("nan")} if self._failed else found

    def logs(self, made: "StepsResult", ends: bool) -> dict[str, Any]:
        """Returns the logs after steps: the metrics' results, or what a custom step returned.

        Args:
          made: the steps.
          ends: whether they end a pass, after which users read results from the metrics themselves.
        """
        if ends:
            self.sums.show()
        if made.failure:
            return {**self._results(), **made.returned}
        if not made.returned:
            return self._results()
        by_metric = self.sums.by_metric()
        return {name: by_metric.get(made.sources.get(name, ""), value) for name, value in made.returned.items()}

    def reset_metrics(self) -> None:
        """Resets the metrics."""
        self.sums.reset()
        self._failed = False

    def _test(self, own_rows: ReplicaRows, number: tf.Tensor) -> None:
        """Runs the model's `test_step` on one replica's rows."""
        variables = self.sums.metrics.variables
        before = [tf.identity(variable) for variable in variables]
        self._recorded = Recording(self._strategy.collectives)  # of the latest trace
        if self._test_reduce_ops.partitioned:
            return self._test_partitioned(own_rows, number)
        static = self._test_reduce_ops.static_rows
        mine = rows_of(own_rows, self._recorded, self._tests_need_all_rows, static)
        draws = randomness.not_training(
            self._seeds, self._options.seed, "evaluate", number, mine.number, self._strategy.replicas
        )
        computing = self._strategy.layouts.computing(self.model.trainable_variables)
        in_replica = using(mine.collectives), running(mine.replica()), keras_internals.functions_inlined()
        with contextlib.ExitStack() as stack:
            for context in (computing, draws, *in_replica):
                stack.enter_context(context)
            operations = keras_internals.count_operations()
            found = self.model.test_step(mine.batch)
            check_none_is_assigned(self.model, self._strategy, operations)
        restore_unless(mine.rows > 0, variables, before)
        if self._test_logs is not None:  # always set while tests are traced
            self._test_logs.keep(found, mine.weights)
        return None

    def _test_partitioned(self, own_rows: ReplicaRows, number: tf.Tensor) -> None:
        collectives, draws = self._recorded, (self._seeds, self._options.seed, "evaluate", number)
        computing = self._strategy.layouts.computing(self.model.trainable_variables)
        with computing, randomness.not_training(*draws, collectives.rank, collectives.size):
            result, _ = partitioned(self.model, self.model.test_step, own_rows, collectives)
        result.assign()
        if self._test_logs is not None:  # always set while tests are traced
            self._test_logs.keep(result.values, of_equal_values(collectives))

    def _test_traced(self) -> None:
        agree_on_plan(self._strategy.peers, self._recorded.calls)
