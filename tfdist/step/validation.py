"""Validates models, optimizers, strategies and data, and replaces an optimizer's loss scaling."""

import logging
from collections.abc import Sequence

import keras

from tfdist import keras_internals
from tfdist.coordination.group import long_timeout
from tfdist.data import Examples
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Clip, LossScale
from tfdist.layers.sync_batch_norm import is_synchronized
from tfdist.pipelining.staged_model import full_model

_log = logging.getLogger(__name__)


def check_created_in_scope(strategy: Strategy, label: str, variables: Sequence[keras.Variable]) -> None:
    """Raises `InputError` if a variable that must be created inside the strategy's scope was created outside of it."""
    outside_path = next((variable.path for variable in variables if not strategy.adoption.owns(variable)), None)
    if outside_path is not None:
        raise InputError(
            f"The {label} must be created inside the strategy's scope, where its variables are placed for the strategy. "
            f"Received: {outside_path}, created outside of it. Create the {label} under `with strategy.scope():`."
        )


def check_own_gradients(optimizer: keras.Optimizer) -> None:
    """Raises `InputError` if an optimizer may need all gradients, because a stage has only some of them."""
    rule = "The optimizer of a stage has only its own gradients. Received: "
    if optimizer.global_clipnorm:
        remedy = f"Pass clip=Clip(norm={optimizer.global_clipnorm}) to the Trainer."
        raise InputError(f"{rule}global_clipnorm={optimizer.global_clipnorm}. {remedy}")
    if keras_internals.classes_overriding_apply(type(optimizer)):
        remedy = "Override update_step instead, which receives one gradient at a time."
        raise InputError(f"{rule}{type(optimizer).__name__}, which overrides apply. {remedy}")


def check_trainable(model: keras.Model) -> None:
    """Raises `InputError` for a built model without trainable variables."""
    if not full_model(model).trainable_variables:  # a stage may have none
        raise InputError("Training requires trainable variables. Received a model without trainable variables.")


def unwrap_loss_scale(optimizer: keras.Optimizer) -> tuple[keras.Optimizer, LossScale | None]:
    """Unwraps Keras's loss scaling, which checks only local gradients: replicas would skip different steps."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer, None
    loss_scale = LossScale(initial=optimizer.initial_scale, growth_interval=optimizer.dynamic_growth_steps)
    text = "tfdist scales the loss equally on all replicas, with the settings of the LossScaleOptimizer: %s"
    _log.info(text, loss_scale)
    return optimizer.inner_optimizer, loss_scale


def default_loss_scale(model: keras.Model) -> LossScale | None:
    """Returns a dynamic loss scale if any layer computes in float16, else None."""
    layers = keras_internals.layers_of(model)
    return LossScale() if any(layer.compute_dtype == "float16" for layer in layers) else None


def check_not_wrapped(optimizer: keras.Optimizer) -> None:
    """Raises `InputError` for an optimizer that sums gradients over Horovod's ranks."""
    wrapper = next((kind for kind in type(optimizer).__mro__ if kind.__module__.startswith(_WRAPPERS)), None)
    if wrapper is not None:
        raise InputError(
            "Gradients must be summed over replicas only once. Received: an optimizer wrapped by "
            f"{wrapper.__module__}. Pass Keras's own optimizer, without `DistributedOptimizer` around it."
        )


def check_optimizer(optimizer: keras.Optimizer, clip: Clip) -> None:
    """Raises `InputError` for optimizer options that duplicate parts of a step."""
    for name, rule in _UNSUPPORTED_OPTIONS.items():
        if value := getattr(optimizer, name, None):
            raise InputError(f"{rule} Received: {name}={value}.")
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise InputError("One optimizer must update all variables. Received: MultiOptimizer. Pass a single optimizer.")
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    clipping = [f"{name}={value}" for name in names if (value := getattr(optimizer, name))]
    if clipping and (clip.norm or clip.value):
        raise InputError(
            f"Gradients must be clipped in one place only. Received: {clip} and an optimizer with {', '.join(clipping)}. "
            "Remove one of them."
        )
    if clipping:
        _log.info("Gradients are clipped after they are summed over replicas: %s", ", ".join(clipping))


def inner_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns the optimizer that updates the weights: the wrapped one if it is a `LossScaleOptimizer`."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def statistics_of_all_replicas(model: keras.Model) -> set[int]:
    """Returns the ids of statistics of all replicas' rows or of weights, which are valid even on a replica without rows."""
    synchronized = [layer for layer in keras_internals.layers_of(model) if getattr(layer, "synchronized", False)]
    statistics = [v for layer in (*synchronized, *synchronized_layers(model)) for v in layer.non_trainable_variables]
    return {id(variable) for variable in (*statistics, *keras_internals.spectral_norm_variables(model))}


def synchronized_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the model's layers that normalize over all replicas."""
    return [layer for layer in keras_internals.layers_of(model) if is_synchronized(layer)]


def check_micro_steps(model: keras.Model, strategy: Strategy, micro_steps: int) -> None:
    """Raises `InputError` if there are micro-steps and a layer that needs all rows of a step at once."""
    if micro_steps == 1:
        return
    if layers := synchronized_layers(model):
        raise InputError(
            "Synchronized BatchNorm computes the moments of all rows of a step, but accumulation computes the step in "
            f"parts. Received: accumulate_steps={micro_steps} and {layers[0].path}. Use --batch_norm=local or "
            "--accumulate_steps=1."
        )
    # Without loops, micro-steps read assigned values as tensors, through which no gradient reaches the variables.
    if not strategy.compiles_loops and (weights := keras_internals.spectral_norm_variables(model)):
        raise InputError(
            "On a mesh, SpectralNormalization does not support several micro-steps. Received: "
            f"accumulate_steps={micro_steps} and {weights[0].path}. Use --accumulate_steps=1 or another --strategy."
        )


_WRAPPERS = ("horovod", "tfdist.horovod")
_UNSUPPORTED_OPTIONS = {
    "gradient_accumulation_steps": (
        "The optimizer must not accumulate gradients itself: remove this option, and use accumulate_steps. `batch_size` "
        "is the batch size of the whole step."
    ),
    "loss_scale_factor": "The optimizer must not divide gradients itself: remove this option, and use loss_scale.",
    "use_ema": "The optimizer must not average weights itself: remove this option, and pass ema to `tfdist.Trainer`.",
}


def trainable_variable_ids(model: keras.Model) -> list[int]:
    """Returns the ids of the currently trainable variables; in a pipeline, those of all stages."""
    return [id(variable) for variable in full_model(model).trainable_variables]


def check_unchanged(model: keras.Model, expected_ids: Sequence[int], optimizer: keras.Optimizer) -> None:
    """Raises `InputError` if trainable variables or the optimizer changed after compilation, which would have no effect.

    `expected_ids` are the ids of the variables that were trainable when the trainer was built; empty if it is not built.
    """
    if expected_ids and trainable_variable_ids(model) != list(expected_ids):
        raise InputError(
            "A Trainer trains the variables that were trainable when it was built. Received a model with other trainable "
            "variables. Create a new Trainer after changing `trainable`."
        )
    if model.optimizer is not optimizer:
        raise InputError(
            "A Trainer keeps its optimizer. Received a model that was compiled again. Create a new Trainer instead."
        )


def check_same_data(strategy: Strategy, data: Examples, label: str = "training data") -> None:
    """Raises `InputError` unless the number, specs and checksum of examples are equal on all processes.

    Otherwise their steps would not match and one process would wait forever, or the stages of a pipeline would have inputs
    and targets of different examples. `label` names the data in messages.
    """
    spec = str(keras.tree.map_structure(lambda s: (s.dtype.name, str(s.shape)), data.element_spec))
    with long_timeout("its data") as deadline:
        strategy.group.agree("data/form", {"form of an example": spec}, f"{label}: ", deadline)
        strategy.group.agree("data/size", {"number of examples": data.size}, f"{label}: ", deadline)
        if not strategy.group.all_equal("data/checksum", data.checksum, deadline):
            raise differing_data_error(
                f"{label} with other values, or from other files, on some processes",
                "Copy the files to all hosts; call",
            )


def differing_data_error(received: str, remedy: str = "Call") -> InputError:
    """Returns the error for batches that differ between processes; `remedy` is the beginning of the last sentence."""
    return InputError(
        "Every process must read the same batches in the same order, of which it uses the rows of its replicas. "
        f"Received: {received}. {remedy} keras.utils.set_random_seed before data is drawn or shuffled, and remove sharding "
        "by rank and parallel maps that draw random numbers."
    )
