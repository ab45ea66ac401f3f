"""`Program`, a built model with its compiled functions, and checks that all processes build the same model."""

import contextlib
import functools
import hashlib
import pathlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.config.spec import unique_names
from tfdist.coordination import Group
from tfdist.coordination.group import long_timeout
from tfdist.data import Examples, explain_reading_errors
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.tf_distribute import strip_counters
from tfdist.layers.sync_batch_norm import synchronize_layers
from tfdist.pipelining.staged_model import full_model
from tfdist.reporting.environment import versions
from tfdist.reporting.schema import check_metric_names
from tfdist.step import metrics
from tfdist.step.compiled_steps import Steps
from tfdist.step.compression import Compression
from tfdist.step.data_check import explain_mismatch
from tfdist.step.inference import Evaluator
from tfdist.step.layer_state import averaged_statistics, averaged_weights
from tfdist.step.partitioned_step import Division
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.validation import check_micro_steps, check_trainable, trainable_variable_ids
from tfdist.synchronization import WeightSynchronizer
from tfdist.synchronization.catalog import make_synchronizer
from tfdist.trainer.data_warnings import add_batch_dim, check_labels, dependence_of, warn_about_evaluation

# A rank with a different model would wait forever in a collective that no other rank enters or, worse, sum tensors that do
# not correspond. The checks before training exchange only hashes unless there is a difference.

_MAX_CHARACTERS = 500  # number of characters of a value that are compared
_IGNORED_SETTINGS = ("name", "seed", "input_layers", "output_layers")  # layer settings that Keras numbers or randomizes


def check_equal(group: Group, model: keras.Model) -> None:
    """Checks that all ranks have the same versions, code and model, before any variable is sent.

    Raises `InputError` on every rank, with the first difference and the ranks' values. The model must be built, and if it
    is compiled, its optimizer as well.
    """
    with long_timeout("its model") as deadline:
        group.agree("models/versions", versions(), "version of ", deadline)
        group.agree("models/code", code_hashes(), "the code of ", deadline, ignore_missing=True)
        group.agree("models/description", model_description(model), "", deadline)


@functools.cache
def _hash(file: str) -> str:
    """Returns the hash of a file at the first call, because later edits do not affect the running code."""
    return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()[:16]


def code_hashes() -> dict[str, str]:
    """Returns the hash of the source file of each loaded module of tfdist and of the user, by file and module name.

    Installed packages are excluded, because their versions are compared.
    """
    hashes = {}
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    for name, module in sorted(sys.modules.items()):
        # `getattr` would trigger the import of a lazily loaded module.
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        is_installed = file.startswith(libraries) or {"site-packages", "dist-packages"} & set(file.split("/"))
        if file.endswith(".py") and (name.partition(".")[0] == "tfdist" or not is_installed):
            with contextlib.suppress(OSError):  # the file was deleted or is in an archive
                hashes[f"{pathlib.Path(file).name} (module {name})"] = _hash(file)
    return hashes


def model_description(model: keras.Model) -> dict[str, str]:
    """Describes a model and its optimizer: the dtype and shape of each variable, and the plain settings of each layer.

    Names are without the counters that Keras appends, which depend on previously created objects.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    variable_specs = [(f"variable {strip_counters(v.path)}", f"{v.dtype}{list(v.shape)}") for v in variables]
    layers = keras_internals.layers_of(model)
    settings = [entry for layer in layers for entry in _settings("layer", layer)]
    settings += _settings("optimizer", optimizer) if optimizer is not None else []
    return unique_names([*variable_specs, *settings], mark=" #")


def _settings(kind: str, part: Any) -> Iterator[tuple[str, str]]:
    title = f"{kind} {strip_counters(part.name)}"
    yield f"{title}: class", type(part).__name__
    config: Any = {}
    with contextlib.suppress(Exception):  # a custom layer may not implement get_config
        config = part.get_config()
    yield from _flatten(f"{title}: ", {key: value for key, value in config.items() if key not in _IGNORED_SETTINGS})


def _flatten(title: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the numbers, strings and lists of them in a nested configuration.

    Lambdas are skipped, because their serialized code contains the path of the source file.
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value.get("class_name") == "__lambda__":
            continue
        if isinstance(value, Mapping):
            yield from _flatten(f"{title}{key}.", value)
            continue
        items = value if isinstance(value, (list, tuple)) else [value]
        if all(isinstance(item, (str, int, float, type(None))) for item in items):
            yield f"{title}{key}", str(value)[:_MAX_CHARACTERS]


class Program:
    """A compiled and built model, equal on all replicas, with its compiled functions.

    Attributes:
      model: the model.
      element_spec: spec of the data with which the model was built; see `Examples`.
      strategy: strategy that runs the model.
      settings: options of the step.
      store: state of the steps, other than weights and optimizer state.
      steps: compiled training loops and probe steps.
      metrics: recorded metrics of the model.
      read_and_reset_metrics: see `tfdist.step.metrics.compile_read_and_reset`.
      statistics: context in which moving statistics are averaged over replicas.
      averaged_weights: context in which the weights are replaced by their moving averages, if there are any.
      evaluator: evaluates the model.
      trainable_ids: ids of the trainable variables.
      synchronizer: exchanges weights between steps.
      dependence: the values that depend on several rows of a batch.
    """

    synchronizer: WeightSynchronizer

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        settings: Settings,
        compression: Compression,
        store: StateStore,
        element_spec: Any,
    ):
        """Creates all variables of a compiled model, and synchronizes them between replicas; every process must call it.

        Raises `InputError` if the model does not fit the data, or differs between processes.
        """
        self.model, self.strategy, self.store, self.element_spec = model, strategy, store, element_spec
        check_labels(model, element_spec)
        with strategy.raise_on_all_members("build"):
            with strategy.scope():
                with explain_mismatch(element_spec), strategy.optimizer_shards.deferred_build(model):
                    keras_internals.build(model, tf.nest.map_structure(add_batch_dim, element_spec))
                check_trainable(model)
            strategy.optimizer_shards.build(model)
        with strategy.scope():
            if not strategy.trains_whole_model:
                check_equal(strategy.group, full_model(model))
                with long_timeout("its model") as deadline:
                    optimizer_settings = dict(_settings("optimizer", model.optimizer))
                    strategy.group.agree("models/optimizer", optimizer_settings, "", deadline)
            with strategy.raise_on_all_members("models"):
                check_equal(strategy.peers, model)
            replicated_state = [v for v in model.optimizer.variables if strategy.optimizer_shards.is_on_all_replicas(v)]
            strategy.synchronize([*model.variables, *replicated_state])
        metrics.check_names(model)
        metrics.check_sums(keras_internals.metrics_of(model))
        check_metric_names([metric.name for metric in keras_internals.compiled_metrics(model)])
        check_metric_names([name for name, _ in keras_internals.metrics_updated_by_calls(model)])
        self.metrics = metrics.ModelMetrics(model)
        for variable in self.metrics.variables:
            if not strategy.adoption.owns(variable):  # replicas would share it, and their sum would be too large
                keras_internals.recreate_variable(variable, strategy.scope())
        self.read_and_reset_metrics = metrics.compile_read_and_reset(self.metrics, strategy)
        self.evaluator = Evaluator(model, strategy, settings.seed, self.metrics, self.read_and_reset_metrics)
        if strategy.replicas > 1:
            synchronize_layers(keras_internals.layers_of(model))
        check_micro_steps(model, strategy, settings.micro_steps)
        steps = Steps(model, strategy, settings, compression, store, self.metrics)
        self.dependence, self.settings = dependence_of(strategy, model, element_spec, settings, steps)
        self.steps = Steps(model, strategy, self.settings, compression, store, self.metrics)
        self.metrics.division = self.dependence.division if strategy.replicas > 1 else "own"
        self.metrics.keep(self.dependence.kept_metrics)
        self.synchronizer = make_synchronizer(settings.sync, model, strategy, compression, store, settings.clip)
        self.statistics, self.averaged_weights = averaged_statistics(model, strategy), averaged_weights(model, strategy)
        self.trainable_ids = trainable_variable_ids(model)

    @property
    def output_division(self) -> Division:
        """The rows that each replica computes in prediction: its own, unless the output for a row may depend on others."""
        is_coupled = self.dependence.error or self.dependence.describe_coupled("output")
        return self.metrics.division if is_coupled else "own"

    def resume(self, values: Mapping[str, Any], step: int) -> None:
        """Restores the other values of a checkpoint, after its variables; `step` is the checkpoint's step."""
        self.steps.restore_methods(values["compression"])
        self.steps.resume_all_reduce_table(values["all_reduce_table"], values["replicas"])
        self.synchronizer.restore(values["exchanges"], step)
        if values["exchanges"] and not self.synchronizer.has_local_weights:
            self.statistics.assign()  # a step without exchanges expects equal statistics

    def run_variables(self, callbacks: CallbackStates) -> RunVariables:
        """Returns all variables of a run with these callbacks, after completing exchanges in progress."""
        self.synchronizer.wait_for_exchange()
        return RunVariables(self.model, self.strategy, self.store, callbacks, self.synchronizer)

    def evaluate(self, examples: Examples, batch_size: int, step: int) -> dict[str, float]:
        """Returns the loss and the metrics over a dataset at a step; see `Trainer.evaluate`."""
        self.read_and_reset_metrics()  # discards the values of earlier calls in metrics of layers
        with self.evaluated_weights(step), explain_reading_errors(examples), explain_mismatch(examples.element_spec):
            results = self.strategy.with_all_replicas(lambda: self.evaluator.evaluate(examples, batch_size))
        warn_about_evaluation(self.strategy, examples, results["loss"])
        return results

    @contextlib.contextmanager
    def evaluated_weights(self, step: int) -> Iterator[None]:
        """Context in which all replicas have the weights to evaluate at a step; every process must enter it."""
        self.average_statistics(step)
        statistics = self.statistics() if self._is_local(step) else contextlib.nullcontext()
        with self.synchronizer.with_global_weights(step), statistics, self.averaged_weights():
            yield

    def average_statistics(self, step: int) -> None:
        """Averages moving statistics over replicas, unless replicas train locally; every process must call it."""
        if not self._is_local(step):
            self.statistics.assign()

    def exchange(self, step: int) -> Mapping[str, float]:
        """Runs the exchanges that are due after `step` updates; returns fields for training records."""
        fields = self.synchronizer.run_exchanges(step)
        if self.synchronizer.is_local_step(step):
            self.average_statistics(step)  # statistics are also averaged at the beginning of local training
        return fields

    def _is_local(self, step: int) -> bool:
        """Returns whether replicas have different statistics after this number of updates."""
        return self.synchronizer.is_local_step(step - 1)

    @property
    def cost(self) -> dict[str, float]:
        """The communication of a step; see `Steps.cost`."""
        return self.steps.cost(self.synchronizer.payload_per_step)
