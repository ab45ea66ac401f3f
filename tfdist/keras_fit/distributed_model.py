"""A Keras model whose `fit`, `evaluate` and `predict` run on a strategy's replicas.

Keras's own methods handle callbacks, validation, epochs, history and the progress bar. The model's functions that read
batches and run steps are replaced.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.fields import field_names
from tfdist.config.job_config import RunConfig
from tfdist.config.train_config import check_arguments
from tfdist.coordination.group import long_timeout
from tfdist.data.batches import checksum, replica_part, static_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.keras_fit import call_agreement
from tfdist.keras_fit.batch_readers import BatchReader, GlobalBatches, batch_spec
from tfdist.keras_fit.compiled_functions import CompiledFunctions
from tfdist.keras_fit.partitioned_step import communication
from tfdist.keras_fit.patches import one_device_context
from tfdist.keras_fit.placement import Placement, create_variables
from tfdist.keras_fit.step_labels import output_dependence, per_row_state
from tfdist.layers.recompute import recompute
from tfdist.layers.sync_batch_norm import synchronize_layers
from tfdist.reporting.warn_once import warn_once
from tfdist.row_semantics.explanation import Communication
from tfdist.step import data_check
from tfdist.step.data_check import explain_mismatch
from tfdist.step.inference import check_outputs, compile_prediction
from tfdist.step.metrics import KerasMetrics
from tfdist.step.partitioned_step import Division
from tfdist.step.row_dependence import log_dependence
from tfdist.step.validation import check_not_wrapped
from tfdist.trainer.program import check_equal


def _compile_prediction(model: keras.Model, strategy: Strategy, options: RunConfig, spec: Any) -> Callable[..., Any]:
    """Calls `compile_prediction` for batches with a spec; logs how outputs that depend on several rows are computed."""

    def outputs(batch: Any) -> Any:
        return check_outputs(model.predict_step(batch))

    division: Division = "own"
    row_state = per_row_state(model)
    if reason := row_state or output_dependence(model, outputs, spec) if strategy.replicas > 1 else "":
        plan = Communication(obstacle="its rows cannot be divided among replicas" if row_state else "")
        if not row_state:
            plan = communication(model, lambda batch: dict(enumerate(tf.nest.flatten(outputs(batch)))), spec)
        log_dependence(model, "predict", reason, plan, strategy, options.rows)
        division = "whole" if plan.obstacle else "partitioned"
    metrics = KerasMetrics(model).variables if model.compiled else []
    return compile_prediction(model, strategy, options.seed, outputs, division, metrics)


_STEP_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")


def _check_strategy(strategy: Strategy, options: RunConfig) -> None:
    """Raises `InputError` if Keras's methods do not support the strategy with these options."""
    if not strategy.trains_whole_model:
        raise InputError(
            f"Keras's own fit needs the whole model in each process. Received: {strategy.name}, whose processes have stages. "
            "Use tfdist.Trainer instead."
        )
    # Replicas have different numbers of rows; on a mesh, the only replica has all rows.
    if strategy.compiles_replicas and not strategy.sums_gradients:
        raise InputError(
            "Keras's own fit needs a strategy whose replicas accept any number of rows. Received: "
            f"{strategy.name}. Use tfdist.Trainer instead."
        )
    check_arguments(
        strategy.name, strategy.declaration, jit_compile=options.jit_compile, compression=options.compression
    )


_SAMPLE_BYTES = 2**24
_MIN_SAMPLE_ROWS = 64


def check_arrays(strategy: Strategy, model: keras.Model, arguments: Mapping[str, Any]) -> None:
    """Checks some rows of the arrays passed to `fit` against the built model and its losses; logs warnings on the chief.

    The arrays are the same on every process. Other data is not checked, nor are models with a custom step, which may use labels
    in any way. Raises `InputError` if the labels do not fit the loss.
    """
    parts = tuple(arguments.get(name) for name in ("x", "y", "sample_weight"))
    parts = parts[:2] if parts[2] is None else parts
    leaves = keras.tree.flatten(parts)
    sizes = {len(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else 0 for leaf in leaves}
    if len(sizes) != 1 or 0 in sizes or keras_internals.is_overridden(model, "train_step"):
        return
    [size] = sizes
    max_rows = size * _SAMPLE_BYTES // max(_SAMPLE_BYTES, sum(leaf.nbytes for leaf in leaves))
    count = min(size, max(max_rows, _MIN_SAMPLE_ROWS))
    sample = keras.tree.map_structure(lambda leaf: leaf[np.arange(count) * size // count], parts)
    findings = data_check.findings(model, sample)
    for finding in sorted(findings, key=lambda finding: not finding.is_error):
        if finding.is_error:
            raise InputError(finding.text)
        if strategy.is_chief:
            warn_once(finding.text)


Original = Callable[..., Any]  # the model's unpatched method
_call_ids = itertools.count(1)
_EAGER_WARNING = (
    "run_eagerly=True is for debugging: every process computes whole batches, as one device would. Remove it to "
    "divide batches among replicas."
)
_LOG_INTERVAL = 10  # steps between updates of the logs unless a callback inspects batches


class DistributedModel:
    """A model on a strategy. Its methods replace methods of the model, and take the original method as their first argument."""

    def __init__(self, model: keras.Model, strategy: Strategy, options: RunConfig):
        _check_strategy(strategy, options)
        values, per_process = dataclasses.asdict(options), field_names(options, "per_process")
        shared_flags = {f"--{name}": value for name, value in values.items() if name not in per_process}
        with long_timeout("its data or its model") as deadline:
            strategy.group.agree("flags", shared_flags, deadline=deadline)
        keras_internals.clear_strategy(model)
        recompute(model, options.recompute)
        self.model, self.strategy, self._options = model, strategy, options
        self._call = _Call("", 0, [], [])
        self._compilation: Any = None
        self._functions: CompiledFunctions | None = None
        self._predict: Callable[..., Any] | None = None
        self._prediction_numbers = itertools.count()
        self._placement = Placement(strategy)
        self._was_eager = False
        self._step = self._steps_since_logs = 0
        self._logs: dict[str, Any] = {}

    # Methods called by users.

    def call(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Calls `fit`, `evaluate`, `predict` or one of the `..._on_batch`, whose batch must be the same on every process."""
        if name.endswith("_on_batch"):
            self._announce(name)
            if name != "train_on_batch":
                self._average_statistics()
            outer_call, self._call = self._call, _Call(name, next(_call_ids), [], [])
            try:
                return original(*args, **kwargs)
            finally:
                self._call = outer_call
        bound = call_agreement.bound_arguments(original, args, kwargs)
        with self._call_context(name, bound.arguments) as call:
            if name != "fit":
                self._average_statistics()
                return original(*bound.args, **bound.kwargs)
            self._synchronize_callbacks(bound.arguments, self._average_statistics, call.needs_current_logs)
            history = original(*bound.args, **bound.kwargs)
            self._average_statistics()
            if self._functions is not None:
                self._functions.keep_loss_scale()
        return history

    def call_eagerly(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Calls a method with `run_eagerly=True`: every process computes whole batches, from equal initial values."""
        if self.strategy.sums_gradients or self.strategy.remote:
            raise InputError(
                f"On {'a mesh' if self.strategy.sums_gradients else 'parameter servers'}, every step is compiled. Received: "
                "run_eagerly=True. Remove it, or debug with another strategy."
            )
        bound = call_agreement.bound_arguments(original, args, kwargs)
        self._announce(name)
        self._placement.equalize(self.model)
        warn_once(_EAGER_WARNING)
        keras_internals.clear_functions(self.model)  # existing functions may be compiled
        if not self.strategy.is_chief and "verbose" in bound.arguments:
            bound.arguments["verbose"] = 0
        if name == "fit":
            self._synchronize_callbacks(bound.arguments, lambda: None, stops_after_batches=True)
        self._average_statistics()
        optimizer = self.model.optimizer if self.model.compiled else None
        self._place_all([optimizer] if optimizer is not None and optimizer.built else [])
        self._was_eager = True
        try:
            with one_device_context(self.model):
                return original(*bound.args, **bound.kwargs)
        finally:
            keras_internals.clear_functions(self.model)

    # Methods called by Keras's own methods.

    def make_train_function(self, original: Original, force: bool = False) -> None:
        """Sets Keras's function for training steps; traces again with `force`, or if the function was set to None."""
        if self._functions is not None and (force or self.model.train_function is None):
            self._functions.forget_training_steps()
        self.model.train_function = functools.partial(self._run_steps, trains=True)

    def make_test_function(self, original: Original, force: bool = False) -> None:
        """Same as `make_train_function`, but for evaluation."""
        if self._functions is not None and (force or self.model.test_function is None):
            self._functions.forget_evaluation_steps()
        self.model.test_function = functools.partial(self._run_steps, trains=False)

    def make_predict_function(self, original: Original, force: bool = False) -> None:
        """Sets Keras's function for predictions; traces again if Keras has set it to None, as `compile` does."""
        if force or self.model.predict_function is None:
            self._predict, self._prediction_numbers = None, itertools.count()
        self.model.predict_function = self._predict_batches

    def reset_metrics(self, original: Original) -> None:
        """Resets the metrics on this process's replicas."""
        self._steps_since_logs, self._logs = 0, {}
        original() if self._functions is None else self._functions.reset_metrics()

    def get_metrics_result(self, original: Original) -> dict[str, Any]:
        """Returns the results of the metrics over all replicas."""
        return original() if self._functions is None else self._functions.results()

    @property
    def distribute_strategy(self) -> "DistributedModel":
        """The object from which Keras requests its dataset."""
        return self

    def experimental_distribute_dataset(self, batches: tf.data.Dataset) -> GlobalBatches:
        """Returns Keras's global batches, whose rows are distributed to replicas."""
        spec, batches_per_pass = batch_spec(batches.element_spec), self._call.batches_per_pass.pop(0)
        with long_timeout("its data") as deadline:
            self.strategy.peers.agree("data/form", {"form of a batch": str(spec)}, "data: ", deadline)
            self.strategy.group.agree("data/size", {"batches": batches_per_pass}, "data: ", deadline)
        self._prepare(spec)
        name, seconds = f"{self._call.name} {self._call.number}", self._options.stall_shutdown_seconds
        trains = self._call.name == "fit" and not self._call.data  # validation data follows the training data
        data = GlobalBatches(batches, self.strategy, name, batches_per_pass, seconds, spec, trains=trains)
        self._call.data.append(data)
        return data

    # Internal methods.

    @contextlib.contextmanager
    def _call_context(self, name: str, arguments: dict[str, Any]) -> Iterator["_Call"]:
        """Context of a call of a Keras method, which prints only on the chief; sets the steps per call that callbacks allow."""
        callbacks = arguments["callbacks"]
        callback_list = getattr(callbacks, "callbacks", None) or list(keras.tree.flatten(callbacks or []))
        inspects_batches = self._announce(name, call_agreement.have_batch_hooks(callback_list, training=name == "fit"))
        length = {key: str(arguments[key]) for key in call_agreement.LENGTH_ARGUMENTS if key in arguments}
        self.strategy.group.agree("call/length", length, deadline=self._options.stall_shutdown_seconds)
        if not self._call.name:  # in nested calls, weights are equal already
            self._placement.equalize(self.model)
        is_cached = arguments.get("kwargs", {}).get("_use_cached_eval_dataset")
        batches_per_pass = [] if is_cached else call_agreement.batches_per_pass(arguments)
        if call_agreement.INFINITE in batches_per_pass:
            raise InputError(
                "A pass over the data must end. Received: a dataset that repeats indefinitely. Specify "
                f"{'steps_per_epoch (validation_steps for validation data)' if name == 'fit' else 'steps'}."
            )
        if not self.strategy.is_chief:
            arguments["verbose"] = 0
        allows_not_finite = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callback_list)
        steps_per_execution = self.model.steps_per_execution if self.model.compiled else 1
        data_arguments = arguments if name == "fit" else {}
        call = _Call(
            name, next(_call_ids), [*batches_per_pass], [], inspects_batches, allows_not_finite, data_arguments
        )
        outer_call, self._call = self._call, call
        if name == "fit" and steps_per_execution == 1 and not inspects_batches:
            lengths = batches_per_pass[0], call_agreement.cardinality(arguments), self._options.steps_per_call
            self.model.steps_per_execution = call_agreement.steps_per_call(*lengths)
        try:
            yield call
            for data in call.data:
                data.compare_remaining()  # a callback may end a pass before its last comparison
        finally:
            self._call = outer_call
            if self.model.compiled:
                self.model.steps_per_execution = steps_per_execution

    def _announce(self, name: str, inspects_batches: bool = False) -> bool:
        return call_agreement.announce(self.strategy, name, inspects_batches, self._options.stall_shutdown_seconds)

    def _synchronize_callbacks(
        self, arguments: dict[str, Any], average: Callable[[], None], stops_after_batches: bool
    ) -> None:
        callbacks = list(keras.tree.flatten(arguments["callbacks"] or []))
        options = average, stops_after_batches, self._options.stall_shutdown_seconds
        arguments["callbacks"] = call_agreement.synchronize_callbacks(self.model, callbacks, self.strategy, *options)

    def _prepare(self, spec: Any) -> None:
        if self._call.name.startswith("predict"):
            if not self.model.built:
                x, *_ = keras.utils.unpack_x_y_sample_weight(spec)
                with self.strategy.adoption.creation():
                    self.model(keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), x))
            self._placement.place(self.model.variables)
            return
        overridden_names = [name for name in _STEP_METHODS if keras_internals.is_overridden(self.model, name)]
        if self.strategy.sums_gradients and overridden_names:  # their losses and gradients have no layouts
            raise InputError(
                "On a mesh, models are trained and evaluated by Keras's own steps. Received: "
                f"{type(self.model).__name__}, which overrides {overridden_names[0]}. Use compile(loss=..., metrics=...) and "
                "add_loss, or another strategy."
            )
        compilation, trains = keras_internals.compilation(self.model), self._call.name in ("fit", "train_on_batch")
        if self._functions is None or self._compilation is not compilation:
            self._functions, self._compilation = self._new_functions(spec, trains), compilation
        if trains:
            self._functions.prepare_training()

    def _new_functions(self, spec: Any, trains: bool) -> CompiledFunctions:
        """Creates the variables of the compiled model, and returns its functions."""
        self._functions = None
        optimizer = self.model.optimizer
        if optimizer is not None:
            check_not_wrapped(optimizer)
        optimizers = [] if optimizer is None else [optimizer]
        update_context = keras_internals.single_device_updates(*optimizers)
        deferred_build = self.strategy.optimizer_shards.deferred_build(self.model)
        with _explain_mismatch(spec), update_context, self.strategy.adoption.creation(), deferred_build:
            create_variables(self.model, spec, trains)
        layers, include_all = keras_internals.layers_of(self.model), self._options.batch_norm == "synchronized"
        synchronize_layers(layers, include_all=include_all)
        check_equal(self.strategy.peers, self.model)
        check_arrays(self.strategy, self.model, self._call.arguments)
        if self._was_eager:
            self._was_eager = False
            with one_device_context(self.model):
                self.model.reset_metrics()
        self._place_all(optimizers)
        functions = CompiledFunctions(self.model, self.strategy, self._options, self._placement)
        functions.reset_metrics()
        return functions

    def _place_all(self, optimizers: Sequence[keras.Optimizer] = ()) -> None:
        metrics = KerasMetrics(self.model).variables if self.model.built else []
        self._placement.place([*self.model.variables, *metrics], optimizers)

    def _average_statistics(self) -> None:
        if self._functions is not None:
            self._functions.average_statistics()

    def _run_steps(self, batches: Any, *, trains: bool) -> dict[str, Any]:
        """Keras's `train_function` and `test_function`.

        Resets metrics when a pass begins, even if the model overrides `reset_metrics`. Returns the logs. They may be those of
        an earlier step if no callback inspects batches, because updating them involves all replicas.
        """
        is_reader = isinstance(batches, BatchReader)
        rows, spec = (batches, batches.spec) if is_reader else self._place_batch(next(iter(batches)))
        functions = self._functions
        assert functions is not None  # created with the data
        starts_pass = not is_reader or rows.is_at_end
        if is_reader and not rows.has_known_length:
            starts_pass, rows = rows.is_at_start, next(rows)
        previous_totals, previous_logs = functions.sums.saved_totals(), self._logs
        if starts_pass:
            functions.reset_metrics()
            self._steps_since_logs, self._logs = 0, {}
        max_steps = self.model.steps_per_execution
        try:
            with _explain_mismatch(spec):
                if trains:
                    result = functions.train(rows, spec, max_steps, self._step, self._call.allows_not_finite)
                    self._step += result.steps
                else:
                    result = functions.test(rows, spec, max_steps)
        except (tf.errors.OutOfRangeError, StopIteration):
            # The data has ended, and Keras had requested another batch without beginning a pass.
            functions.sums.restore(previous_totals)
            self._logs = previous_logs
            if isinstance(rows, BatchReader):
                rows.compare_all()
            raise
        self._steps_since_logs += result.steps
        ends_pass = not isinstance(rows, BatchReader) or rows.is_at_end
        if self._call.needs_current_logs or ends_pass or not self._logs or self._steps_since_logs >= _LOG_INTERVAL:
            self._logs, self._steps_since_logs = functions.logs(result, ends_pass), 0
        return self._logs

    def _predict_batches(self, data: Any) -> Any:
        """Keras's `predict_function`."""
        spec = self._call.data[-1].spec if self._call.data else None
        batches = [(batch, spec) if isinstance(batch, ReplicaRows) else self._place_batch(batch) for batch in data]
        outputs = []
        for rows, rows_spec in batches:
            if self._predict is None:
                self._predict = _compile_prediction(self.model, self.strategy, self._options, rows_spec)
            number = tf.constant(next(self._prediction_numbers), tf.uint64)
            batch_outputs = self._predict(rows, number, static_rows(rows_spec))
            outputs.append(tf.nest.map_structure(lambda value: self.strategy.local(value)[0], batch_outputs))
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    def _place_batch(self, batch: Any) -> tuple[Any, Any]:
        """Returns an in-memory batch, which must be the same on every process, in the form for `Strategy.run`, and its spec."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        present_parts = tuple(value for value in (x, y, weight) if value is not None)
        tensors = tf.nest.map_structure(tf.convert_to_tensor, present_parts)
        if self.strategy.cluster.size > 1:
            self.strategy.peers.agree("batch", {"batch": checksum(tensors)}, f"{self._call.name}: the bytes of the ")
        spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), tensors)
        self._prepare(spec)
        strategy, trains = self.strategy, self._call.name == "train_on_batch"
        parts, count = strategy.training_shares if trains else (strategy.local_replicas, strategy.replicas)
        return strategy.per_replica([replica_part(tensors, part, count) for part in parts]), spec


class _Call(NamedTuple):
    name: str  # of the method
    number: int  # identifies the call in this process
    batches_per_pass: list[int | None]  # number of batches in each dataset that Keras will request, in order
    data: list[GlobalBatches]  # the datasets that Keras has requested
    needs_current_logs: bool = True  # whether logs must be up to date after each batch
    allows_not_finite: bool = False  # whether to log a loss that is not finite instead of raising
    arguments: Mapping[str, Any] = {}  # the arguments of `fit`; empty for other methods


def _explain_mismatch(batch: Any) -> contextlib.AbstractContextManager:
    """Calls `explain_mismatch` for data with labels; for other data, returns a context that does nothing."""
    if not (isinstance(batch, tuple) and len(batch) > 1):
        return contextlib.nullcontext()
    return explain_mismatch(tf.nest.map_structure(lambda s: s and tf.TensorSpec(s.shape[1:], s.dtype), batch))
