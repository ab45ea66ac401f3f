"""What one compilation of a model runs: its steps, evaluation and prediction on replicas, and its logs."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.accepting import check_micro_steps, check_optimizer, default_loss_scale, without_loss_scale
from tfdist.collectives import Recording, using
from tfdist.config import RunConfig
from tfdist.data.batches import Dealt, count_rows, with_any_rows
from tfdist.errors import InputError, NotFiniteError
from tfdist.gradients import Clip, parse_loss_scale
from tfdist.kept import Kept
from tfdist.loop import compile_loop, loop_on_the_host, not_finite
from tfdist.metrics import KerasMetrics, Totals, check_sums, make_average_statistics, make_drain
from tfdist.plans import agree_on_plan
from tfdist.step import Settings, restore_without_rows
from tfdist.steps import Compression, Steps
from tfdist.stock.first_batch import FirstBatch, Laws, has_own_code
from tfdist.stock.logs import Logs, Returned, look_at
from tfdist.stock.loops import once, repeated
from tfdist.stock.one_device import Replica, running
from tfdist.stock.own_step import OwnStep, Place
from tfdist.stock.reading import Reading
from tfdist.stock.replaced import overridden
from tfdist.strategy import HasCollectives


class Functions:
    """The functions of a model that is compiled and built.

    Attributes:
      totals: sums of the metrics' variables since they were reset, as far as they have left the devices.
    """

    def __init__(self, model: keras.Model, strategy: HasCollectives, options: RunConfig, place: Place):
        """Makes the state that they share.

        Args:
          model: compiled, and built.
          strategy: where they run.
          options: what becomes of gradients.
          place: puts variables where the strategy wants them.
        """
        if model.run_eagerly:
            raise InputError(
                "Steps on replicas are compiled. Received: run_eagerly=True. Leave it out, or debug without tfdist."
            )
        check_sums([metric for metric in model.metrics if metric.variables])
        _check_zeros(model, strategy)
        self.model, self._strategy, self._options, self._place = model, strategy, options, place
        self.totals = Totals()
        self._find_variables()
        self._failed = False
        self._training: _Steps | _OwnSteps | None = None
        # One replica has all rows. What is Keras's own is right on any rows.
        self._checks = options.check_first_batch and strategy.replicas > 1 and has_own_code(model)
        self._spoken = Recording(strategy.collectives)
        self._test_logs: Logs | None = None
        self._tests = repeated(strategy, self._test, self._test_traced), once(strategy, self._test, self._test_traced)

    def _find_variables(self) -> None:
        """Finds the metrics and moving statistics that the model has now: its own steps may create some when looked at."""
        self._metrics = KerasMetrics(self.model)
        self._drain = make_drain(self._metrics, self._strategy)
        self._zero = _zeroed(self._metrics.variables, self._strategy)
        self.average_statistics = make_average_statistics(self.model, self._strategy)

    def train(self, batches: Any, spec: Any, most: int, number: int, goes_on: bool) -> "Made":
        """Makes steps.

        Args:
          batches: a `Reading`, or a `Dealt` for `Strategy.run`.
          spec: structure of `tf.TensorSpec` of a batch.
          most: so many steps, unless the pass over the data ends before.
          number: of the first step.
          goes_on: whether to return after a step that is not finite, instead of raising.
        """
        if self._training is None:
            self._training = self._made_steps(spec)
        if self._training.is_checked or not self._checks:
            made = self._training.go(batches, most, number)
        else:
            made = self._first(batches, most, number)
        if made.failure and not goes_on:
            raise made.failure
        self._failed = self._failed or made.failure is not None
        return made

    def _first(self, batches: Any, most: int, number: int) -> "Made":
        """The first steps; before them the first batch is looked at."""
        assert self._training is not None  # made by who calls this
        first = next(batches) if isinstance(batches, Reading) else batches
        names = self._training.results_of_metrics
        self._training.follow(
            FirstBatch(self.model, self._strategy, self.model.train_step, "train_step", names).laws(first)
        )
        made = self._training.go(first, 1, number)
        if most == 1 or made.failure or not isinstance(batches, Reading) or batches.at_end:
            return made
        more = self._training.go(batches, most - 1, number + 1)
        return more._replace(steps=made.steps + more.steps)

    def _made_steps(self, spec: Any) -> "_Steps | _OwnSteps":
        if not any(overridden(self.model, name) for name in ("train_step", "compute_loss", "compute_metrics")):
            return _Steps(self.model, self._strategy, self._options, self._metrics)
        made = _OwnSteps(self.model, self._strategy, self._options, spec, self._place)
        self._find_variables()
        self.reset_metrics()
        return made

    def test(self, batches: Any, spec: Any, most: int) -> "Made":
        """Evaluates batches; takes and returns what `train` does."""
        if self._test_logs is None:
            first = self._begin_tests(batches, spec)
            if first is not None:
                self._tests[1](first, 0)
                more = isinstance(batches, Reading) and most > 1 and not batches.at_end
                return self._tested(batches, most - 1, 1) if more else self._found_by_test(1)
        if not isinstance(batches, Reading):
            self._tests[1](batches, 0)
            return self._found_by_test(1)
        return self._tested(batches, most, 0)

    def _tested(self, batches: Reading, most: int, before: int) -> "Made":
        steps = batches.ahead(most)
        self._tests[0](batches.rows, 0, steps)
        batches.took(steps)
        return self._found_by_test(before + steps)

    def _found_by_test(self, steps: int) -> "Made":
        assert self._test_logs is not None  # since tests have begun
        return Made(steps, self._test_logs.read(), self._test_logs.sources)

    def _begin_tests(self, batches: Any, spec: Any) -> Any:
        """Looks at what a test does; returns the first batch if it was looked at, too."""
        has_own = any(overridden(self.model, name) for name in ("test_step", "compute_metrics"))
        returned = self._looked_at_test(spec) if has_own else Returned()
        if not self._checks:
            self._test_logs = Logs(returned, self._strategy, Kept(self._strategy), "test_step")
            return None
        first = next(batches) if isinstance(batches, Reading) else batches
        names = returned.sources.keys() if has_own else _All()
        laws = FirstBatch(self.model, self._strategy, self.model.test_step, "test_step", names).laws(first)
        self._test_logs = Logs(returned, self._strategy, Kept(self._strategy), "test_step", laws.logs)
        return first

    def _looked_at_test(self, spec: Any) -> Returned:
        returned = look_at(self.model, self.model.test_step, spec)
        metrics = [variable for metric in self.model.metrics for variable in metric.variables]
        self._place([*self.model.variables, *metrics])
        if len(metrics) != len(self._metrics.variables):
            self._find_variables()
            self.reset_metrics()
        return returned

    def keep_loss_scale(self) -> None:
        """Writes the loss scale to where Keras keeps it, and saves it."""
        scale, optimizer = self._training.loss_scale if self._training else None, self.model.optimizer
        if scale is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.dynamic_scale.assign(scale)

    def results(self) -> dict[str, Any]:
        """The metrics' results since they were reset."""
        self.totals.add(self._drain())
        found = self.totals.results(self._metrics)
        return found | {"loss": float("nan")} if self._failed else found

    def logs(self, made: "Made") -> dict[str, Any]:
        """What Keras is told behind steps: the metrics' results, or what the model's own step returned."""
        results = self.results()
        if made.failure:
            return {**results, **made.returned}
        if not made.returned:
            return results
        by_metric = self._metrics.by_metric(self.totals.sums)
        return {name: by_metric.get(made.sources.get(name, ""), value) for name, value in made.returned.items()}

    def reset_metrics(self) -> None:
        """Metrics start anew."""
        self._zero()
        self._failed = False
        self.totals = Totals()
        self.totals.add([np.zeros(variable.shape) for variable in self._metrics.variables])

    def _test(self, dealt: Dealt, number: tf.Tensor) -> None:
        """The model's `test_step` on one replica's rows."""
        batch, batch_size = with_any_rows(dealt)
        rows, variables = count_rows(batch), self._metrics.variables
        before = [tf.identity(variable) for variable in variables]
        self._spoken = Recording(self._strategy.collectives)  # of the last trace
        replica = Replica(self._spoken, rows, batch_size)
        with using(self._spoken), running(replica), keras_internals.functions_inlined():
            found = self.model.test_step(batch)
        restore_without_rows(rows, variables, before)
        if self._test_logs is not None:  # as it is when tests are traced
            self._test_logs.keep(found, rows, batch_size)

    def _test_traced(self) -> None:
        agree_on_plan(self._strategy.group, self._spoken.calls)


class Made(NamedTuple):
    """Steps that were made.

    Attributes:
      steps: how many.
      returned: what the model's own step returned last; empty where it has none.
      sources: which metric's result each value is, if it is one; see `KerasMetrics.by_metric`.
      failure: what to raise if the last one was not finite.
    """

    steps: int
    returned: Mapping[str, Any] = {}
    sources: Mapping[str, str] = {}
    failure: NotFiniteError | None = None


class _All(Collection[str]):
    """Every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Steps:
    """The trainer's step."""

    def __init__(self, model: keras.Model, strategy: HasCollectives, options: RunConfig, metrics: KerasMetrics):
        settings = _settings(model, strategy, options)
        self._kept = Kept(strategy)
        if settings.loss_scale:
            self._kept.variables(settings.loss_scale.state())
        self._scaled = settings.loss_scale is not None
        self._model = model
        self._steps = Steps(model, strategy, settings, _compression(options), self._kept, metrics)
        self.results_of_metrics: Collection[str] = _All()
        self.is_checked = False

    def follow(self, laws: Laws) -> None:
        """The trainer's step takes means over rows."""
        self.is_checked = True
        if "sum" in laws.gradients:
            raise InputError(
                "A loss is a mean over the rows of a batch. Received: one that `add_loss` takes as a sum over them. Divide it "
                "by the number of rows."
            )

    def go(self, batches: Any, most: int, number: int) -> Made:
        read = isinstance(batches, Reading)
        steps = batches.ahead(most) if read else 1
        loop = self._steps.loop(None, compile_loop if read else loop_on_the_host)
        rows = batches.rows if read else iter([batches])
        result = loop(rows, tf.constant(number, tf.int64), tf.constant(steps), tf.constant(False))
        losses = result.losses.numpy()  # fewer than steps if one was not finite
        if read:
            batches.took(len(losses))
        if bool(result.may_go_on):
            return Made(len(losses))
        last, variables = number + len(losses) - 1, self._model.trainable_variables
        return Made(len(losses), failure=not_finite(last, losses[-1], result, variables, self.loss_scale))

    @property
    def loss_scale(self) -> float | None:
        """The scale now; None without one."""
        return float(self._kept.array("loss_scale/scale").values) if self._scaled else None


class _OwnSteps:
    """The model's own step."""

    loss_scale = None

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        options: RunConfig,
        spec: Any,
        place: Place,
    ):
        settings = _settings(model, strategy, options)
        self._step = OwnStep(model, strategy, settings, _compression(options), Kept(strategy), spec, place)
        self.is_checked = not (options.check_first_batch and strategy.replicas > 1)
        if self.is_checked:
            self._step.follow(Laws())
        self.results_of_metrics = self._step.results_of_metrics
        self._repeated = repeated(strategy, self._step.run, self._step.traced)
        self._once = once(strategy, self._step.run, self._step.traced)

    def follow(self, laws: Laws) -> None:
        """Says how the values of replicas make the whole batch's."""
        self.is_checked = True
        self._step.follow(laws)

    def go(self, batches: Any, most: int, number: int) -> Made:
        if not isinstance(batches, Reading):
            self._once(batches, number)
            return self._made(1, number)
        steps = batches.ahead(most)
        self._repeated(batches.rows, number, steps)
        batches.took(steps)
        return self._made(steps, number)

    def _made(self, steps: int, first: int) -> Made:
        logs = self._step.logs.read()
        bad = [name for name, value in logs.items() if not np.all(np.isfinite(value))]
        if not bad:
            return Made(steps, logs, self._step.logs.sources)
        last = first + steps - 1
        return Made(
            steps,
            logs,
            failure=NotFiniteError(f"What train_step returned is not finite at step {last}: {bad[0]}={logs[bad[0]]}."),
        )


def _settings(model: keras.Model, strategy: HasCollectives, options: RunConfig) -> Settings:
    clip = Clip(norm=options.clip_norm, value=options.clip_value)
    optimizer, taken = without_loss_scale(model.optimizer)
    check_optimizer(optimizer, clip)
    check_micro_steps(model, options.accumulate_steps)
    return Settings(
        batch_size=None,
        seed=options.seed,
        jit_compile=options.jit_compile or (strategy.replicas == 1 and bool(model.jit_compile)),
        micro_steps=options.accumulate_steps,
        clip=clip,
        loss_scale=parse_loss_scale(options.loss_scale) or taken or default_loss_scale(model),
        max_skipped_steps=options.max_skipped_steps,
    )


def _compression(options: RunConfig) -> Compression:
    found = Compression(
        methods=options.compression,
        min_bytes=options.compression_min_bytes,
        bucket_bytes=int(options.bucket_mb * 2**20),
    )
    if found.choice:
        raise InputError(
            "Compression is chosen by measurement in tfdist's own trainer alone. Received: "
            f"--compression={options.compression}. Name a method, or use `python -m tfdist.train`."
        )
    return found


def _check_zeros(model: keras.Model, strategy: HasCollectives) -> None:
    """Sums over replicas begin with zeros; call it before the first batch."""
    for metric in model.metrics:
        for variable in metric.variables:
            if np.any(np.asarray(strategy.local(variable.value)[0])):
                raise InputError(
                    "A metric's variables must be 0 to begin with, as they are added up over replicas. Received: "
                    f"{metric.name} with {variable.path}, which is not. Begin with zeros, and add in `result`."
                )


def _zeroed(variables: Sequence[keras.Variable], strategy: HasCollectives) -> Callable[[], None]:
    def replica_function() -> None:
        for variable in variables:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    @tf.function(autograph=False)
    def zero() -> None:
        strategy.run(replica_function)

    return zero
