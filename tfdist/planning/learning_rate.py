"""The search for the learning rate: trains with increasing rates, and restores the trainer afterwards."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tfdist import keras_internals
from tfdist.config.search import LearningRateSearch
from tfdist.data import Examples, Pipeline, explain_reading_errors
from tfdist.errors import InputError, names_arguments
from tfdist.planning.rate_curve import LearningRates, divergence, learning_rates, rates_between
from tfdist.reporting import RunPlan
from tfdist.step.compiled_loop import not_finite_error
from tfdist.step.data_check import explain_mismatch
from tfdist.step.validation import check_same_data, inner_optimizer
from tfdist.trainer.data_warnings import check_examples
from tfdist.trainer.fit_arguments import check_fit, fit_arguments
from tfdist.trainer.options import Checks, Reporting, Schedule
from tfdist.trainer.program import Program
from tfdist.trainer.trainer import Trainer, expects_one_hot_targets, reporting_context

_SYNC_POINT = "find/learning_rate"


@names_arguments
def find_learning_rate(
    trainer: Trainer,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    verbose: int | str = "auto",
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    steps_per_epoch: int | None = None,
    *,
    min: float = LearningRateSearch.min,
    max: float = LearningRateSearch.max,
    steps: int = LearningRateSearch.steps,
    schedule: Schedule | None = None,
    checks: Checks | None = None,
) -> LearningRates:
    """Searches for a learning rate by training with a rate that grows at each step (Smith, arXiv:1506.01186).

    Step i, counted from 0, has the rate min * (max / min) ** (i / (steps - 1)), instead of the optimizer's own rate or
    schedule. The search ends when the loss has diverged: when it is not finite, or its running mean is more than four times
    the lowest one, or twice the first loss. Otherwise it trains like `fit`, with the trainer's strategy, batches and
    options. Every process must call it, and gets the same result.

    Afterwards, the trainer is restored bit for bit, even if the search fails: weights, optimizer, statistics, step and position
    in the data. Meanwhile, a copy of all variables is kept in the host's memory.

    Args:
      trainer: trainer with any weights; it is built if necessary.
      x: data to train on, as for `Trainer.fit`; not a generator, because it cannot be read again.
      y: as for `Trainer.fit`.
      batch_size: as for `Trainer.fit`. The best rate depends on it.
      verbose: as for `Trainer.fit`.
      shuffle: as for `Trainer.fit`.
      class_weight: as for `Trainer.fit`.
      sample_weight: as for `Trainer.fit`.
      steps_per_epoch: as for `Trainer.fit`.
      min: learning rate of the first step.
      max: learning rate of the last step.
      steps: number of steps, at least 10.
      schedule: only `steps_per_call` applies.
      checks: only the watchdog applies.

    Returns:
      The losses by learning rate, and the suggested learning rate.

    Raises:
      InputError: an argument is invalid.
      NotFiniteError: the first loss is inf or NaN.
    """
    search = LearningRateSearch(min, max, steps)
    check_fit(None, class_weight, schedule, checks, None, None)
    arguments = fit_arguments(
        x,
        y,
        batch_size,
        steps=steps,
        shuffle=shuffle,
        class_weight=class_weight,
        one_hot=expects_one_hot_targets(trainer.model),
        sample_weight=sample_weight,
        steps_per_epoch=steps_per_epoch,
    )
    examples, strategy = arguments.data.train, trainer.strategy
    if not examples.is_reiterable:
        raise InputError(
            "A search for the learning rate needs data that can be read again. Received: a generator. Pass arrays, a "
            "tf.data.Dataset or a PyDataset."
        )
    check_same_data(strategy, examples)
    trainer.batch_schedule(examples.size, batch_size=arguments.batch_size)  # raises for a batch that cannot be divided
    program = trainer.build(examples)
    check_examples(strategy, trainer.model, examples, None, program.settings, program.dependence)
    with (
        reporting_context(Reporting(), verbose, strategy.is_chief) as reporting,
        (checks or Checks()).watchdog(strategy.group) as watchdog,
    ):
        sweep = _Sweep(program, search, examples, arguments.batch_size, trainer.step)
        per_call = (schedule or Schedule()).steps_per_call
        reporting.reporter.start(RunPlan(total_steps=steps, batch_size=arguments.batch_size))
        with sweep, explain_reading_errors(examples):
            while not sweep.is_over:
                first = sweep.steps_done
                watchdog.begin(first, first + per_call)
                sweep.call(per_call)
                watchdog.end_call(sweep.steps_done)
                if sweep.losses:
                    last = len(sweep.losses) - 1
                    fields = {"loss": sweep.losses[last], "learning_rate": sweep.rates[last]}
                    reporting.reporter.progress(len(sweep.losses), fields)
    return learning_rates(sweep.rates, sweep.losses, arguments.batch_size)


class _Sweep:
    """The steps of a search, as a context that restores all variables on exit."""

    def __init__(self, program: Program, search: LearningRateSearch, examples: Examples, batch_size: int, step: int):
        """Creates the state of the steps; `step`, the number of previous updates, determines the random numbers of layers."""
        self.rates = rates_between(search.min, search.max, search.steps)
        self.losses: list[float] = []
        self.steps_done = 0
        self._program, self._examples, self._batch_size, self._first_step = program, examples, batch_size, step
        self._may_continue = True
        model, strategy = program.model, program.strategy
        optimizer = inner_optimizer(model.optimizer)
        previous_updates = int(strategy.local(keras_internals.value_of(optimizer.iterations))[0])
        self._loop = program.steps.loop_at_rate(batch_size, _exponential_rate(search, previous_updates))
        variables = [*model.variables, *model.optimizer.variables, *program.metrics.variables]
        values = [keras_internals.value_of(variable) for variable in variables]
        self._variables = [
            *(value for value in values if value is not None),
            *(variable for _, variable in program.store.items()),
        ]

    def __enter__(self) -> "_Sweep":
        program = self._program
        program.read_and_reset_metrics()
        self._restore = program.strategy.blocks.snapshot(self._variables)
        pipeline = Pipeline(self._examples.sample, self._batch_size, program.settings.seed)
        self._iterator = program.strategy.distribute(pipeline.indexed_dataset)
        return self

    def __exit__(self, *_: object) -> None:
        del self._iterator  # stops threads that read ahead
        self._restore()  # must not communicate, because this rank may be the only one that failed

    @property
    def is_over(self) -> bool:
        has_diverged = divergence(self.losses, len(self.rates)) is not None
        return not self._may_continue or len(self.losses) == len(self.rates) or has_diverged

    def call(self, count: int) -> None:
        """Runs up to `count` steps in one call of the compiled loop.

        Steps that are skipped by a loss scale are not in the curve; their rates are tried again.
        """
        count = min(count, len(self.rates) - len(self.losses))
        with explain_mismatch(self._examples.element_spec):
            result = self._loop(
                self._iterator,
                tf.constant(self._first_step + self.steps_done, tf.int64),
                tf.constant(count),
                tf.constant(False),
            )
        losses, is_counted = result.losses.numpy(), result.is_finite.numpy()
        if not result.may_continue and not self.losses and not is_counted.any():
            variables, scale = self._program.model.trainable_variables, self._program.store.loss_scale
            raise not_finite_error(
                self._first_step + self.steps_done + len(losses) - 1, losses[-1], result, variables, scale
            )
        self.steps_done += len(losses)
        self._may_continue = bool(result.may_continue)
        rate_losses = [float(loss) for loss, is_valid in zip(losses, is_counted, strict=True) if is_valid]
        if not self._may_continue and not is_counted[-1]:
            rate_losses.append(math.inf)
        # The losses are the same on all ranks; rank 0's are used to ensure that the search ends on all of them.
        local_losses = [loss if np.isfinite(loss) else None for loss in rate_losses]
        agreed_losses = self._program.strategy.group.broadcast(_SYNC_POINT, local_losses)
        self.losses += [math.inf if loss is None else loss for loss in agreed_losses]


def _exponential_rate(search: LearningRateSearch, previous_updates: int) -> Callable[[Any], tf.Tensor]:
    """Returns a function that computes the learning rate from the number of updates, including those before the search."""
    exponent = math.log(search.max / search.min) / (search.steps - 1)

    def rate(iterations: Any) -> tf.Tensor:
        updates = ops.cast(ops.cast(iterations, "int64") - previous_updates, keras.config.floatx())
        return search.min * ops.exp(exponent * updates)

    return rate
