"""Checks the data of a run. Errors are raised on every process, and the chief logs warnings."""

import dataclasses
import math
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.coordination.group import long_timeout
from tfdist.data import Examples, Pipeline, Source, explain_reading_errors
from tfdist.data.inputs import evaluation_errors
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, count_of
from tfdist.reporting.warn_once import warn_once
from tfdist.row_semantics.explanation import Explanation, listener
from tfdist.step import data_check
from tfdist.step.compiled_steps import Steps
from tfdist.step.data_check import explain_mismatch
from tfdist.step.row_dependence import RowDependence, communicates, log_no_effect, row_dependence
from tfdist.step.settings import Settings

# Keras's warning about a problem that `data_check.findings` also reports.
_KERAS_WARNING = r".*received `from_logits=True`, but the `output` argument was produced by"
_SAMPLE_SIZE = 64  # number of examples to check; more for arrays in memory
_TRAINER_CONSEQUENCE = "a Trainer rejects it with pipeline stages, tensor layouts and local training"
_EVALUATION_SITUATION = "evaluation is not finite"  # see `warn_once`; detected in the data or in the loss


def check_labels(model: keras.Model, element_spec: Any) -> None:
    """Raises `InputError` for labels that do not fit the loss, before the model is built."""
    errors = [finding.text for finding in data_check.spec_findings(model, element_spec) if finding.is_error]
    if errors:
        raise InputError(errors[0])


def dependence_of(
    strategy: Strategy, model: keras.Model, element_spec: Any, settings: Settings, steps: Steps
) -> tuple[RowDependence, Settings]:
    """Returns which values of a model depend on several rows of a batch, and the settings of steps that compute them."""
    parts, has_listener = strategy.micro_batches or settings.micro_steps, listener() is not None
    # Batches have a static number of rows, which code may read.
    spec = tf.nest.map_structure(lambda x: x and tf.TensorSpec([1, *x.shape], x.dtype), tuple(element_spec))
    has_whole_model = strategy.trains_whole_model and not strategy.layouts.shards_tensors
    combines_rows = has_whole_model and strategy.can_train_locally and not settings.sync.exchanges_weights
    with strategy.in_use(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_KERAS_WARNING)  # shown again for the examples or in the first step
        dependence = row_dependence(
            model,
            spec,
            is_divided=strategy.replicas * parts > 1 or has_listener,
            has_whole_model=has_whole_model,
            may_communicate=parts == 1 or combines_rows,
        )
    if combines_rows and (dependence.reasons or communicates(dependence.calls)):
        reason = next(iter(dependence.reasons), "its code communicates")
        if settings.micro_steps > 1:
            log_no_effect(f"--accumulate_steps={settings.micro_steps}", model, reason, strategy)
            single_pass = dataclasses.replace(settings, micro_steps=1)
            return dependence_of(strategy, model, element_spec, single_pass, steps)
        dependence = _with_division(dependence, strategy, spec, steps)
        if settings.jit_compile and dependence.division != "own":
            log_no_effect("--jit_compile", model, reason, strategy)
    if explain := listener():
        consequence = dependence.communication.fallback if combines_rows else _TRAINER_CONSEQUENCE
        step, variables = f"A step of {model.name}", model.trainable_variables
        explain(Explanation(step, dependence.values, dependence.error, consequence, variables, dependence.calls))
    return dependence, settings


def _with_division(dependence: RowDependence, strategy: Strategy, spec: Any, steps: Steps) -> RowDependence:
    """Returns the dependence with its `division` and `kept_metrics`."""
    kept_metrics = [name for name, coupling in dependence.metrics.items() if coupling == "batches"]
    dependence = dependence._replace(kept_metrics=kept_metrics)
    if not dependence.reasons or (strategy.replicas == 1 and not listener()):
        return dependence
    with strategy.in_use():
        plan = steps.communication(spec)
    return dependence._replace(communication=plan, division="whole" if plan.obstacle else "partitioned")


def check_examples(
    strategy: Strategy,
    model: keras.Model,
    data: Examples,
    evaluation: Examples | None,
    settings: Settings,
    dependence: RowDependence,
) -> list[tuple[str, str]]:
    """Checks some examples on the chief, without advancing the data or a random state; every process must call it.

    Returns:
      On the chief, the text and the situation (see `warn_once`) of each warning; empty on other processes.

    Raises:
      InputError: on every process, if evaluation data does not fit the model; if the labels make training or evaluation
        meaningless; or, where replicas cannot exchange rows, if a metric is not a sum over batches or rows, a loss is not
        a mean over rows, or outputs or state depend on several rows together.
    """
    if evaluation is not None:
        check_evaluation(strategy, model, data.element_spec, evaluation.element_spec)
    # Every process reads, because reading may advance a random generator.
    train, test = _sample(data), None if evaluation is None else _sample(evaluation)
    is_chief, parts = strategy.is_chief, strategy.micro_batches or settings.micro_steps
    findings = data_check.findings(model, train) if is_chief else []
    errors = [finding.text for finding in findings if finding.is_error]
    if findings or not is_chief:
        warnings.filterwarnings("ignore", message=_KERAS_WARNING)
    if settings.sync.exchanges_weights and parts == 1:
        # Replicas that train locally have their own state, which is averaged at each exchange.
        dependence = _without_state(dependence)
    errors += _division_errors(dependence, strategy.replicas, parts)
    if test is not None and is_chief:
        test_findings = data_check.findings(model, test)
        errors += [f"Evaluation data: {finding.text}" for finding in test_findings if finding.is_error]
    _raise_first(strategy, "data/refusal", errors)
    if not is_chief:
        return []
    data_warnings = [(finding.text, "") for finding in findings]
    if dependence.error and dependence.division == "own" and strategy.replicas * parts > 1:
        text = (
            f"Whether rows of a batch depend on each other could not be checked: {dependence.error}. Training with "
            f"{_division(strategy.replicas, parts)} has the same result as on one device only if losses, metrics, "
            "outputs and the state of layers depend on single rows, or are means over rows."
        )
        data_warnings.append((text, ""))
    if test is not None and (locations := data_check.non_finite_locations(test)):
        text = _non_finite_message(locations, "the results of evaluations are NaN or wrong")
        data_warnings.append((text, _EVALUATION_SITUATION))
    return data_warnings


def check_standalone_evaluation(strategy: Strategy, dependence: RowDependence) -> None:
    """Checks that an evaluation without training has the same results as on one device; every process must call it.

    Raises `InputError` on every process if there are several replicas or micro-batches that cannot exchange rows, and a
    loss is not a mean over rows, a metric is not a sum, or outputs depend on several rows together.
    """
    parts = strategy.micro_batches or 1
    if strategy.replicas * parts == 1:
        return
    stateless = _without_state(dependence)  # only training assigns state
    _raise_first(strategy, "evaluation/refusal", _division_errors(stateless, strategy.replicas, parts))


def _raise_first(strategy: Strategy, name: str, errors: list[str]) -> None:
    """Raises `InputError` on every process with the first of the chief's errors, if any."""
    with long_timeout("its data") as deadline:
        if refusal := strategy.group.broadcast(name, errors[:1], deadline):
            raise InputError(refusal[0])


def _without_state(dependence: RowDependence) -> RowDependence:
    return dependence._replace(values=[value for value in dependence.values if value.kind != "variable"])


def add_batch_dim(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
    """Returns the spec of a batch of examples of any size."""
    return None if spec is None else tf.TensorSpec([None, *spec.shape], spec.dtype)


def _division(replicas: int, micro_steps: int) -> str:
    return f"{count_of(replicas, 'replica')} and {count_of(micro_steps, 'micro-step')}"


def _division_errors(dependence: RowDependence, replicas: int, parts: int) -> list[str]:
    division = _division(replicas, parts)
    if dependence.division != "own":
        return []
    if losses := dependence.describe_coupled("loss"):
        return [
            "Where replicas cannot exchange rows (pipeline stages, tensor layouts, local training), a loss must be a mean over "
            f"rows. Received: {'; '.join(losses)}; with {division}. Remove these losses, or use losses that are computed "
            "for each row."
        ]
    metrics = {name: coupling for name, coupling in dependence.metrics.items() if name not in dependence.kept_metrics}
    if metrics:
        return [
            "Where replicas cannot exchange rows (pipeline stages, tensor layouts, local training), a metric must be a sum "
            f"over rows and batches. Received: {name}, whose value is not the sum of its values for parts of the {coupling}, "
            f"with {division}. Write a metric function so that it returns one value per row, or a Metric class so that its "
            "variables are sums over rows; or remove the metric."
            for name, coupling in metrics.items()
        ]
    if state := dependence.describe_coupled("variable"):
        return [
            "Where replicas cannot exchange rows (pipeline stages, tensor layouts), state that a layer updates from a batch "
            "during training must be a floating-point mean over the rows. Received: "
            f"{state[0]}, with {division}. Remove the layer, or compute its state from tfdist.gather_rows(rows)."
        ]
    return [
        "Where replicas cannot exchange rows (pipeline stages, tensor layouts, local training), the output for a row must not "
        f"depend on other rows. Received: the output of {output}, with {division}. Remove the layers that combine rows."
        for output in dependence.describe_coupled("output")
    ]


def check_evaluation(strategy: Strategy, model: keras.Model, training_spec: Any, element_spec: Any) -> None:
    """Raises `InputError` if evaluation data differs from the training data in its spec and does not fit the model."""
    if element_spec[:2] == training_spec[:2]:
        return
    with evaluation_errors():
        check_labels(model, element_spec)
        with strategy.scope(), explain_mismatch(element_spec):
            keras_internals.check_fits(model, tf.nest.map_structure(add_batch_dim, element_spec))


def warn_about_evaluation(strategy: Strategy, data: Examples, loss: float) -> None:
    """Logs a warning on the chief if the loss is not finite, unless there was a warning about the data."""
    if math.isfinite(loss):
        return
    # Every process reads, because reading may advance a random generator.
    locations = data_check.non_finite_locations(_sample(data))
    if not strategy.is_chief:
        return
    cause = f"the evaluation loss is {loss:g}, so the evaluation is meaningless"
    if locations:
        text = _non_finite_message(locations, cause)
    else:
        text = f"{cause[0].upper()}{cause[1:]}. Check the evaluation data for NaN, inf and very large values."
    warn_once(text, situation=_EVALUATION_SITUATION)


def locate_nonfinite(data: Examples, batch_size: int, seed: int, first_example: int) -> list[str]:
    """Returns where the batch after `first_example` examples, or a sample without random access, has NaN or inf."""
    source = data.sample
    if not isinstance(source, Source):
        return data_check.non_finite_locations(_sample(data))
    batches = Pipeline(source, batch_size, seed, first_example).dataset([0], 1)
    with explain_reading_errors(source):
        return data_check.non_finite_locations(data_check.as_arrays(next(iter(batches))))


def _non_finite_message(locations: list[str], result: str) -> str:
    return (
        f"The evaluation data has NaN or inf in {' and in '.join(locations)}: {result}. Remove or replace these values."
    )


def _sample(data: Examples) -> Any:
    with explain_reading_errors(data):
        return data_check.as_arrays(data.sample.preview(_SAMPLE_SIZE))
