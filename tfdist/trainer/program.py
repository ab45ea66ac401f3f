"""`Program`: a built model with the functions that are compiled for it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data import Examples, explained_reading
from tfdist.distribution.strategy import Strategy
from tfdist.layers.sync_batch_norm import synchronize_layers
from tfdist.reporting.schema import check_metric_names
from tfdist.step import metrics
from tfdist.step.communication_cost import cost_of
from tfdist.step.compiled_steps import Steps
from tfdist.step.compression import Compression
from tfdist.step.data_mismatch import must_fit
from tfdist.step.evaluation import Evaluator
from tfdist.step.row_dependence import RowDependence
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.temporary_values import TemporaryValues, averaged_statistics, averaged_weights
from tfdist.step.validation import check_micro_steps, check_trains, trained_ids
from tfdist.synchronization import Exchanges
from tfdist.synchronization.catalog import make_exchanges
from tfdist.trainer.consistency import check_equal, check_equal_stages
from tfdist.trainer.data_warnings import check_evaluation, check_form, dependence_of, warn_of_evaluation


class Program(NamedTuple):
    """A compiled and built model, equal on all replicas, and what is compiled for it on its strategy.

    Attributes:
      model: the model.
      element_spec: of the data with which it was built; see `Examples`.
      strategy: strategy on which it is trained.
      settings: options of the step.
      store: state of the steps besides weights and optimizer state.
      steps: compiled training loops and probe steps.
      metrics: metrics of the model that are recorded.
      drain: see `tfdist.step.metrics.make_drain`.
      statistics: context in which moving statistics are their mean over replicas.
      averaged_weights: context in which the model has the moving average of its weights, if there is one.
      evaluator: evaluates the model.
      trained: ids of the variables that are trained.
      exchanges: exchanges of weights between steps.
      dependence: what of the model depends on several rows of a batch.
    """

    model: keras.Model
    element_spec: Any
    strategy: Strategy
    settings: Settings
    store: StateStore
    steps: Steps
    metrics: metrics.ModelMetrics
    drain: Callable[[], list[np.ndarray]]
    statistics: TemporaryValues
    averaged_weights: TemporaryValues
    evaluator: Evaluator
    trained: list[int]
    exchanges: Exchanges
    dependence: RowDependence

    @property
    def partitions_outputs(self) -> bool:
        """Whether outputs for a row depend on other rows, and are partitioned."""
        return self.metrics.count_all_rows and bool(self.dependence.wrong("output"))

    def resume(self, saved: Mapping[str, Any], step: int) -> None:
        """Takes over the values of a checkpoint at a step, whose variables have been restored."""
        self.steps.go_on(saved["compression"])
        self.steps.resume_all_reduce_table(saved["all_reduce_table"], saved["replicas"])
        self.exchanges.restore(saved["exchanges"], step)
        if saved["exchanges"] and not self.exchanges.has_local_weights:
            self.statistics.assign()  # a step without exchanges expects equal ones, if it computes with them

    def accepting(self, examples: Examples) -> "Program":
        """Returns this program; raises `InputError` for examples to evaluate that do not fit the model."""
        check_evaluation(self.strategy, self.model, self.element_spec, examples.element_spec)
        return self

    def evaluate(self, examples: Examples, batch_size: int, step: int) -> dict[str, float]:
        """Returns the loss and the metrics over a whole data set at a step; see `Trainer.evaluate`."""
        self.drain()  # discards what earlier calls added to metrics of layers
        with self.evaluated_weights(step), explained_reading(examples), must_fit(examples.element_spec):
            results = self.evaluator.evaluate(examples, batch_size)
        warn_of_evaluation(self.strategy, examples, results["loss"])
        return results

    @contextlib.contextmanager
    def evaluated_weights(self, step: int) -> Iterator[None]:
        """Context in which all replicas have the weights to evaluate at a step; every process must enter it."""
        self.average_statistics(step)
        statistics = self.statistics() if self._is_local(step) else contextlib.nullcontext()
        with self.exchanges.averaged(step), statistics, self.averaged_weights():
            yield

    def average_statistics(self, step: int) -> None:
        """Replaces moving statistics by their mean for good, unless replicas train locally; every process must call it."""
        if not self._is_local(step):
            self.statistics.assign()

    def exchange(self, step: int) -> Mapping[str, float]:
        """Exchanges what is due once `step` updates have been done; returns fields for training records."""
        found = self.exchanges.at(step)
        if self.exchanges.is_local_step(step):
            self.average_statistics(step)  # where local training begins, replicas agree on the statistics, too
        return found

    def _is_local(self, step: int) -> bool:
        """Returns whether, after this number of updates, replicas have statistics of their own with which they train."""
        return self.exchanges.is_local_step(step - 1)

    @property
    def cost(self) -> dict[str, float]:
        """What a step sends; see `Steps.cost`."""
        return cost_of(self.exchanges.payload_per_step, self.steps.gradient_bytes) or self.steps.cost

    @property
    def loss_scale(self) -> float | None:
        """The current factor of the loss; None without loss scaling."""
        return loss_scale(self.settings, self.store)


def loss_scale(settings: Settings, store: StateStore) -> float | None:
    """Returns the current factor of the loss; None without loss scaling."""
    if settings.loss_scale is None:
        return None
    return float(np.min(store.array("loss_scale/scale").values))  # each replica may have its own


def build(
    model: keras.Model,
    strategy: Strategy,
    settings: Settings,
    compression: Compression,
    store: StateStore,
    element_spec: Any,
) -> Program:
    """Creates all variables of a compiled model, and makes them equal on all replicas; every process must call it.

    Args:
      model: compiled model.
      strategy: strategy in whose scope it was created.
      settings: options of the step.
      compression: how gradients are summed over replicas.
      store: store of the steps' state.
      element_spec: of the training data; see `Examples`.

    Raises:
      InputError: the model does not fit the data, or differs between processes.
    """
    check_form(model, element_spec)
    batched = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), element_spec)
    with strategy.refused_together("build"):
        with strategy.scope():
            with must_fit(element_spec), strategy.optimizer_shards.built_later(model):
                keras_internals.build(model, batched)
            check_trains(model)
        strategy.optimizer_shards.build(model)
    with strategy.scope():
        if not strategy.trains_whole_model:
            check_equal_stages(strategy.group, model)
        with strategy.refused_together("models"):
            check_equal(strategy.peers, model)
        own = [v for v in model.optimizer.variables if strategy.optimizer_shards.is_of_all(v)]
        strategy.synchronize([*model.variables, *own])
    metrics.check_names(model)
    metrics.check_sums(keras_internals.metrics_of(model))
    check_metric_names(keras_internals.names_of_compiled_metrics(model))
    check_metric_names([name for name, _ in keras_internals.metrics_updated_by_calls(model)])
    recorded = metrics.ModelMetrics(model)
    for variable in recorded.variables:
        if not strategy.adoption.owns(variable):  # replicas would share it, and its sum over them be too large
            keras_internals.create_again(variable, strategy.scope())
    drain = metrics.make_drain(recorded, strategy)
    evaluator = Evaluator(model, strategy, settings.seed, recorded, drain)
    if strategy.replicas > 1:
        synchronize_layers(keras_internals.layers_of(model))
    check_micro_steps(model, strategy, settings.micro_steps)
    steps = Steps(model, strategy, settings, compression, store, recorded)
    trained = trained_ids(model)
    averaged = averaged_weights(model, strategy)
    exchanges = make_exchanges(settings.sync, model, strategy, compression, store)
    dependence = dependence_of(strategy, model, element_spec, settings, steps)
    recorded.count_all_rows = dependence.is_partitioned and strategy.replicas > 1
    return Program(
        model,
        element_spec,
        strategy,
        settings,
        store,
        steps,
        recorded,
        drain,
        averaged_statistics(model, strategy),
        averaged,
        evaluator,
        trained,
        exchanges,
        dependence,
    )
