"""The trainer: one Keras model, its optimizer and its strategy, ready to be trained, evaluated and saved."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals, metrics
from tfdist.data import Examples, as_data_set, as_examples, check_equal_shares, steps_in_epochs, with_class_weight
from tfdist.errors import InputError
from tfdist.evaluation import Evaluator
from tfdist.gradients import Bucketed, Reducer, Sum
from tfdist.layers import SyncBatchNormalization
from tfdist.models import with_batch_norm
from tfdist.reporting import NullProfile, NullReporter, Reporter
from tfdist.reporting.schema import check_metric_names
from tfdist.run import History, Run, Schedule
from tfdist.step import Result, Step, compile_loop
from tfdist.strategy import HasCollectives, Strategy, current_strategy


class Trainer:
    """Trains one Keras model under the strategy whose scope is open.

    The model, the optimizer and the metrics are ordinary Keras objects, created in the same scope. Gradients are combined
    once, by tfdist; step k is one update with the global batch of `batch_size` examples that (seed, k) names.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        optimizer: keras.Optimizer | str,
        loss: Any = None,
        metrics: Sequence[Any] = (),
        weighted_metrics: Sequence[Any] = (),
        loss_weights: Any = None,
        reducer: Reducer | None = None,
        seed: int = 0,
        jit_compile: bool = False,
    ):
        """Compiles the model.

        Args:
          model: built or not, created under the strategy's scope.
          optimizer: Keras's; one that scales losses or accumulates gradients by itself is refused.
          loss: as for `keras.Model.compile`; may be None if layers call `add_loss`.
          metrics: as for `keras.Model.compile`.
          weighted_metrics: as for `keras.Model.compile`.
          loss_weights: as for `keras.Model.compile`.
          reducer: sums gradients over replicas; by default exactly, in buckets.
          seed: of the order of examples and of random layers.
          jit_compile: compiles forward and backward with XLA.
        """
        self.strategy = _with_collectives(current_strategy())
        self.model = model
        self.step = 0
        self.seed = seed
        self._jit_compile = jit_compile
        self._reducer = reducer or Bucketed(Sum())
        model.compile(
            optimizer=optimizer,
            loss=loss,
            metrics=list(metrics) or None,
            weighted_metrics=list(weighted_metrics) or None,
            loss_weights=loss_weights,
            jit_compile=False,
        )
        _check_optimizer(model.optimizer)
        self._built = False
        self._loops: dict[int, Callable[..., Result]] = {}

    def fit(
        self,
        data: Any,
        *,
        batch_size: int,
        steps: int = 0,
        epochs: int = 0,
        log_every: int = 10,
        eval_every: int = 0,
        steps_per_call: int = 10,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        class_weight: Mapping[int, float] | None = None,
        reporter: Reporter | None = None,
        profile: NullProfile | None = None,
    ) -> "History":
        """Trains for so many steps or epochs more.

        Args:
          data: a `DataSet`, a source, arrays (x, y), a `tf.data.Dataset` of single examples, or a pair of those for training
            and test; what there is for test is evaluated as the schedule says.
          batch_size: examples of a global batch, over all replicas.
          steps: updates; give this or `epochs`.
          epochs: passes over the data.
          log_every: steps between records of metrics.
          eval_every: steps between evaluations; 0 for each epoch's end.
          steps_per_call: steps in one call of the compiled loop; changes speed, never the result.
          callbacks: Keras's, the same on every process.
          class_weight: weight of each class's examples.
          reporter: told about the run on the chief.
          profile: when to profile.

        Raises:
          InputError: an argument is wrong.
          NotFiniteError: a loss is inf or NaN; names the step.
        """
        if self.strategy.equal_shares:
            check_equal_shares(batch_size, self.strategy.replicas)
        whole = as_data_set(data, "data")
        train, test = whole.train, whole.test
        if bool(steps) == bool(epochs):
            raise InputError(f"Give either `steps` or `epochs`. Received: steps={steps}, epochs={epochs}.")
        done = self.step * batch_size // train.size
        total = self.step + steps if steps else steps_in_epochs(done + epochs, train.size, batch_size)
        schedule = Schedule(steps=total, log_every=log_every, eval_every=eval_every, steps_per_call=steps_per_call)
        source = with_class_weight(train, class_weight) if class_weight else train
        self.build(source)
        return Run(
            self, source, test, batch_size, schedule, callbacks, reporter or NullReporter(), profile or NullProfile()
        ).go()

    def evaluate(self, data: Any, *, batch_size: int) -> dict[str, float]:
        """The loss and the metrics of a whole data set, the same for any number of replicas.

        Args:
          data: what to evaluate on.
          batch_size: examples at a time, over all replicas; does not change the result.
        """
        examples = as_examples(data)
        self.build(examples)
        self.average_statistics()
        return self._evaluator.evaluate(examples, batch_size)

    def build(self, data: Examples) -> None:
        """Creates every variable, and makes them equal on all replicas; a second call does nothing."""
        if self._built:
            return
        batched = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), data.element_spec)
        with self.strategy.scope():
            keras_internals.build(self.model, batched)
            self.strategy.synchronize([*self.model.variables, *self.model.optimizer.variables])
        metrics.check_additive(self.model)
        check_metric_names(metric.name for metric in keras_internals.metrics_of(self.model))
        self.drain = metrics.make_drain(self.model, self.strategy)
        self.average_statistics = metrics.make_average_statistics(self.model, self.strategy)
        self._evaluator = Evaluator(self.model, self.strategy, self.drain)
        self._built = True

    def compiled(self, batch_size: int) -> Callable[..., Result]:
        """The compiled loop for a batch size; see `tfdist.step.compile_loop`. Made once, traced at its first call."""
        if batch_size not in self._loops:
            step = Step(
                self.model,
                self.strategy,
                self._reducer,
                batch_size=batch_size,
                seed=self.seed,
                jit_compile=self._jit_compile,
            )
            self._loops[batch_size] = compile_loop(step, self.strategy)
        return self._loops[batch_size]

    def save(self, path: str) -> None:
        """Writes the model in Keras's own format, on the chief; every process calls it.

        Keras alone can load it: in inference, synchronized BatchNorm is an ordinary one, and is saved as one. The
        optimizer's state goes with the model unless a layer had to be replaced so.
        """
        self.average_statistics()
        if self.strategy.is_chief:
            portable = any(isinstance(layer, SyncBatchNormalization) for layer in keras_internals.layers_of(self.model))
            (with_batch_norm(self.model, "local") if portable else self.model).save(path)


def _with_collectives(strategy: Strategy) -> HasCollectives:
    if not isinstance(strategy, HasCollectives):
        raise InputError(f"The trainer needs a strategy that has collectives. Received: {type(strategy).__name__}.")
    return strategy


def _check_optimizer(optimizer: keras.Optimizer) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InputError(
            "The optimizer must not scale the loss by itself: replicas would disagree on which steps to skip. Received: "
            "LossScaleOptimizer. Pass the optimizer that it wraps."
        )
    if optimizer.gradient_accumulation_steps:
        raise InputError(
            "The optimizer must not accumulate gradients by itself. Received: gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}. Leave it out: a step's batch is `batch_size` as a whole."
        )
