"""`DistributedOptimizer`, its partial form, and `load_model`: Horovod's functions, for Keras 3 optimizers."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.errors.formatting import is_integer
from tfdist.horovod.compression import Compression, validate_compression
from tfdist.horovod.data_movement import with_alternative_signature
from tfdist.horovod.gradient_sums import GradientSums, Options
from tfdist.horovod.ops import Average, Sum, to_reduce_op
from tfdist.horovod.process import engine, horovod_is_installed, is_initialized, on_init
from tfdist.horovod.process_sets import global_process_set
from tfdist.horovod.wrapped_optimizer import Accumulation, is_distributed, pickling_error, wrap_optimizer


@functools.cache
def patch_keras() -> None:
    """Patches `make_train_function`, `make_test_function`, `compile` and the loss scale of Keras, once.

    After `init`, models are trained and evaluated without XLA, because any step may communicate and XLA cannot compile
    communication. A loss scale around a distributed optimizer checks the gradients of all ranks, which then apply or
    skip a step together; it cannot be pickled, because the restored optimizer would not reduce gradients. `compile` ignores
    `experimental_run_tf_function`, which Horovod's scripts for TensorFlow 2 pass.
    """
    original_make_train_function, original_make_test_function = (
        keras.Model.make_train_function,
        keras.Model.make_test_function,
    )
    loss_scale_class = keras.optimizers.LossScaleOptimizer
    original_check_finite, original_reduce = loss_scale_class.check_finite, loss_scale_class.__reduce__
    # Keras compares the `compile` of this class with the `compile` of each model.
    trainer: Any = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    original_compile = trainer.compile

    @functools.wraps(original_make_train_function)
    def make_train_function(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if is_initialized() or needs_communication(self):
            self.jit_compile = False
        if needs_communication(self) and self.steps_per_execution > 1 and not horovod_is_installed():
            raise InputError(
                f"Without Horovod steps_per_execution is 1. Received: {self.steps_per_execution}. Leave it out, or run "
                "`tfdist install_horovod`."
            )
        return original_make_train_function(self, *args, **kwargs)

    @functools.wraps(original_make_test_function)
    def make_test_function(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if is_initialized():
            self.jit_compile = False
        return original_make_test_function(self, *args, **kwargs)

    @functools.wraps(original_compile)
    def compile(self: keras.Model, *args: Any, experimental_run_tf_function: bool = False, **kwargs: Any) -> None:
        original_compile(self, *args, **kwargs)

    @functools.wraps(original_check_finite)
    def check_finite(self: keras.optimizers.LossScaleOptimizer, grads: Any) -> tf.Tensor:
        is_finite = original_check_finite(self, grads)
        inner_optimizer: Any = self.inner_optimizer
        return (
            all_true(is_finite, inner_optimizer.reduction.options.process_set)
            if is_distributed(inner_optimizer)
            else is_finite
        )

    @functools.wraps(original_reduce)
    def __reduce__(self: keras.optimizers.LossScaleOptimizer) -> Any:
        if is_distributed(self.inner_optimizer):
            raise pickling_error(self)
        return original_reduce(self)

    keras.Model.make_train_function, keras.Model.make_test_function = make_train_function, make_test_function
    trainer.compile = compile
    loss_scale_class.check_finite, loss_scale_class.__reduce__ = check_finite, __reduce__


def needs_communication(model: keras.Model) -> bool:
    """Returns whether a model's training step communicates with the other ranks."""
    optimizer = getattr(model, "optimizer", None)
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        return True
    return any(getattr(layer, "communicates_across_ranks", False) for layer in model._flatten_layers())


def all_true(condition: tf.Tensor, process_set: Any) -> tf.Tensor:
    """Returns whether a scalar bool is true on all ranks of a set, except for ranks that have joined.

    Sends one small message.
    """
    collectives = engine().collectives_of(process_set)
    false_count = tf.cast(tf.logical_not(condition), tf.float32)  # a rank that has joined adds 0
    [count] = collectives.all_reduce([tf.reshape(false_count, [1])], name="finite")
    return tf.equal(count[0], 0.0)


on_init(patch_keras)


def _uses_tensorflow_signature(optimizer: Any = None, name: Any = None, *arguments: Any) -> bool:
    """Detects the signature of `horovod.tensorflow`: a bool `use_locking` in the position of a device."""
    return bool(arguments) and isinstance(arguments[0], bool)


_TENSORFLOW_ARGUMENTS = (
    "optimizer",
    "name",
    "use_locking",
    "device_dense",
    "device_sparse",
    "compression",
    "sparse_as_dense",
    "backward_passes_per_step",
    "op",
    "gradient_predivide_factor",
    "average_aggregated_gradients",
    "num_groups",
    "groups",
    "process_set",
    "scale_local_gradients",
)


@with_alternative_signature(_TENSORFLOW_ARGUMENTS, _uses_tensorflow_signature)
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Any] | None = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
    use_locking: bool = False,
) -> keras.Optimizer:
    """Returns a copy of a Keras 3 optimizer that reduces gradients over the ranks before it applies them.

    It works in `model.fit`, which trains without XLA, and in custom loops with `apply` or `apply_gradients`. Each step costs
    an all-reduce of all gradients in buckets of 4 MiB, 2 n (N - 1) / N bytes sent for n. `iterations` and schedules count
    updates, even with `backward_passes_per_step`.

    Args:
      optimizer: any Keras 3 optimizer; a `LossScaleOptimizer` may be wrapped or wrap the result. Ranks skip steps together.
      name: name of the messages; defaults to "Distributed" and the name of the class.
      device_dense: device on which dense gradients are reduced.
      device_sparse: accepted, but has no effect.
      compression: `Compression.none`, `.fp16`, or a method of tfdist such as `Compression.powersgd(rank=4)`, also as a string.
      sparse_as_dense: whether `tf.IndexedSlices` are summed as dense tensors.
      gradient_predivide_factor: divisor of gradients before the sum of a mean; the sum is divided by the remaining factor.
      op: Average or Sum.
      backward_passes_per_step: number of calls whose gradients each rank sums before they are reduced and applied.
      average_aggregated_gradients: whether that sum is divided by the number of calls.
      num_groups: deprecated; use `groups`.
      groups: accepted, but has no effect: tfdist forms the buckets.
      process_set: the ranks that reduce.
      scale_local_gradients: whether the gradients of local variables are divided by the number of ranks.
      use_locking: accepted, but has no effect.

    Raises:
      InputError: the optimizer is not a Keras 3 optimizer or is already distributed, or an argument is invalid. Raised by
        the first step if the ranks' gradients differ.
    """
    check_groups(num_groups, groups)
    if to_reduce_op(op) not in (Average, Sum):
        raise InputError(
            f"DistributedOptimizer takes op=Average or Sum. Received: {to_reduce_op(op).name}. Use "
            "hvd.DistributedGradientTape."
        )
    options = Options(
        name=name or f"Distributed{type(optimizer).__name__}",
        compression=validate_compression(compression),
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=validate_factor(gradient_predivide_factor, op),
        op=to_reduce_op(op),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        device_dense=device_dense,
    )
    accumulation = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    patch_keras()
    return wrap_optimizer(optimizer, GradientSums(options), accumulation)


def PartialDistributedOptimizer(  # noqa: D417, N802 - Horovod's name; see DistributedOptimizer for other arguments
    optimizer: keras.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | Sequence[Any] | None = None,
    process_set: Any = global_process_set,
    local_layers: keras.Layer | Sequence[keras.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> keras.Optimizer:
    """Same as `DistributedOptimizer`, but does not reduce the gradients of some layers.

    Args:
      local_layers: built layers whose gradients are not reduced, but divided by the number of ranks if
        `scale_local_gradients`. For the other arguments, see `DistributedOptimizer`.
    """
    optimizer_copy = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local_variables(local_layers):
        optimizer_copy.register_local_var(variable)
    return optimizer_copy


def local_variables(layers: keras.Layer | Sequence[keras.Layer] | None) -> list[keras.Variable]:
    """Returns the trainable variables of local layers; raises `InputError` unless all are built layers."""
    if layers is None:
        return []
    layer_list = [layers] if isinstance(layers, keras.Layer) else list(layers)
    for layer in layer_list:
        if not isinstance(layer, keras.Layer) or not layer.built:
            raise InputError(f"local_layers must be built Keras layers. Received: {layer!r}. Build the model first.")
    return [variable for layer in layer_list for variable in layer.trainable_weights]


def validate_factor(factor: float, op: int) -> float:
    """Validates `gradient_predivide_factor`, which must be positive, and is supported for Average only."""
    if factor != 1.0 and to_reduce_op(op) != Average:
        raise InputError(
            f"gradient_predivide_factor is for op=Average. Received: op={to_reduce_op(op).name}. Leave it out."
        )
    if not factor > 0:
        raise InputError(f"gradient_predivide_factor must be above 0. Received: {factor}. Leave it out.")
    return factor


def check_groups(num_groups: int, groups: int | Sequence[Any] | None) -> None:
    """Validates Horovod's arguments for groups, which have no effect, because tfdist forms the buckets."""
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
    if groups is not None and not isinstance(groups, list) and not (is_integer(groups) and groups > 0):
        raise InputError(
            f"groups must be an integer above 0 or a list of lists of variables. Received: {groups!r}. Leave it out."
        )


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[keras.Optimizer]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a model with `keras.models.load_model` and wraps its optimizer, with its state, in `DistributedOptimizer`.

    Args:
      filepath: a model saved with a distributed or an ordinary optimizer.
      custom_optimizers: classes of optimizers that Keras does not know.
      custom_objects: other classes and functions that Keras does not know, by name.
      compression: compression of the distributed optimizer; its state is not saved with the model.
      legacy_opts: False; Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise InputError("Keras 3 has no legacy optimizers. Received: legacy_opts=True. Leave it out.")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
