"""Horovod's `DistributedOptimizer`, `PartialDistributedOptimizer` and `load_model`, for Keras 3 optimizers."""

import functools
import inspect
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError, is_integer
from tfdist.horovod.compression import Compression, validate_compression
from tfdist.horovod.gradient_sums import GradientSums, Options
from tfdist.horovod.operations import with_alternative_signature
from tfdist.horovod.ops import Average, Sum, to_reduce_op
from tfdist.horovod.process import engine, horovod_is_installed, is_initialized, on_init
from tfdist.horovod.process_sets import global_process_set
from tfdist.horovod.wrapped_optimizer import Accumulation, Distributed, is_distributed, wrap_optimizer


@functools.cache
def patch_keras() -> None:
    """Patches `make_train_function`, `make_test_function`, `compile` and the loss scale of Keras, once.

    After `init`, models are trained and evaluated without XLA, because any step may communicate and XLA cannot compile
    communication. A loss scale around a distributed optimizer checks the gradients of all ranks, which then apply or
    skip a step together. It cannot be pickled, either. `compile` ignores `experimental_run_tf_function`, which Horovod's
    scripts for TensorFlow 2 pass.
    """
    loss_scale_class = keras.optimizers.LossScaleOptimizer
    original_check_finite, original_reduce = loss_scale_class.check_finite, loss_scale_class.__reduce__
    # Keras compares the `compile` of this class with the `compile` of each model.
    trainer: Any = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    original_compile = trainer.compile

    def without_xla(make_function: Any) -> Any:
        @functools.wraps(make_function)
        def make(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            if is_initialized() or needs_communication(self):
                self.jit_compile = False
            if needs_communication(self) and self.steps_per_execution > 1 and not horovod_is_installed():
                raise InputError(
                    f"Without Horovod, steps_per_execution must be 1. Received: {self.steps_per_execution}. Remove it, or run "
                    "`tfdist install_horovod`."
                )
            return make_function(self, *args, **kwargs)

        return make

    @functools.wraps(original_compile)
    def compile(self: keras.Model, *args: Any, experimental_run_tf_function: bool = False, **kwargs: Any) -> None:
        original_compile(self, *args, **kwargs)

    @functools.wraps(original_check_finite)
    def check_finite(self: keras.optimizers.LossScaleOptimizer, grads: Any) -> tf.Tensor:
        is_finite, inner_optimizer = original_check_finite(self, grads), self.inner_optimizer
        if not isinstance(inner_optimizer, Distributed):
            return is_finite
        collectives = engine().collectives_of(inner_optimizer.reduction.options.process_set)
        false_count = tf.cast(tf.logical_not(is_finite), tf.float32)  # a rank that has joined adds 0
        [count] = collectives.all_reduce([tf.reshape(false_count, [1])], name="finite")
        return tf.equal(count[0], 0.0)

    @functools.wraps(original_reduce)
    def __reduce__(self: keras.optimizers.LossScaleOptimizer) -> Any:
        if is_distributed(self.inner_optimizer):
            pickle.dumps(self.inner_optimizer)  # raises InputError
        return original_reduce(self)

    for name in ("make_train_function", "make_test_function"):
        setattr(keras.Model, name, without_xla(getattr(keras.Model, name)))
    trainer.compile = compile
    loss_scale_class.check_finite, loss_scale_class.__reduce__ = check_finite, __reduce__


on_init.append(patch_keras)


def needs_communication(model: keras.Model) -> bool:
    """Returns whether a model's training step communicates with the other ranks."""
    optimizer = getattr(model, "optimizer", None)
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        return True
    return any(getattr(layer, "communicates_across_ranks", False) for layer in model._flatten_layers())


_TENSORFLOW_ARGUMENTS = (
    "optimizer name use_locking device_dense device_sparse compression sparse_as_dense backward_passes_per_step op"
    " gradient_predivide_factor average_aggregated_gradients num_groups groups process_set scale_local_gradients"
).split()
_PARTIAL_ARGUMENTS = (
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op groups process_set"
    " local_layers scale_local_gradients"
).split()


# The signature of `horovod.tensorflow` has a bool, `use_locking`, in the position of a device.
@with_alternative_signature(_TENSORFLOW_ARGUMENTS, lambda *args: len(args) > 2 and isinstance(args[2], bool))
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
    local_layers: keras.Layer | Sequence[keras.Layer] | None = None,
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
      gradient_predivide_factor: for a mean, divisor of gradients before they are summed; the sum is divided by N / factor.
      op: Average or Sum.
      backward_passes_per_step: number of calls whose gradients each rank sums before they are reduced and applied.
      average_aggregated_gradients: whether that sum is divided by the number of calls.
      num_groups: deprecated; use `groups`.
      groups: accepted, but has no effect: tfdist forms the buckets.
      process_set: the ranks that reduce.
      scale_local_gradients: whether the gradients of local variables are divided by the number of ranks.
      use_locking: accepted, but has no effect.
      local_layers: built layers whose gradients are not reduced, but divided by the number of ranks if
        `scale_local_gradients`; an argument of `PartialDistributedOptimizer`.

    Raises:
      InputError: the optimizer is not a Keras 3 optimizer or is already distributed, or an argument is invalid. Raised by
        the first step if the ranks' gradients differ.
    """
    check_groups(num_groups, groups)
    if (reduce_op := to_reduce_op(op)) not in (Average, Sum):
        raise InputError(
            f"DistributedOptimizer takes op=Average or Sum. Received: {reduce_op.name}. Use hvd.DistributedGradientTape."
        )
    name, method = name or f"Distributed{type(optimizer).__name__}", validate_compression(compression)
    arguments = gradient_predivide_factor, process_set, scale_local_gradients
    options = Options(name, method, sparse_as_dense, reduce_op, *arguments, device_dense)
    accumulation = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    patch_keras()
    optimizer_copy = wrap_optimizer(optimizer, GradientSums(options), accumulation)
    for variable in local_variables(local_layers):
        optimizer_copy.register_local_var(variable)
    return optimizer_copy


# Horovod's function with the argument `local_layers`.
PartialDistributedOptimizer = with_alternative_signature(_PARTIAL_ARGUMENTS, lambda *args: True)(
    inspect.unwrap(DistributedOptimizer)
)


def local_variables(layers: keras.Layer | Sequence[keras.Layer] | None) -> list[keras.Variable]:
    """Returns the trainable variables of local layers; raises `InputError` unless all are built layers."""
    if layers is None:
        return []
    layer_list = [layers] if isinstance(layers, keras.Layer) else list(layers)
    for layer in layer_list:
        if not isinstance(layer, keras.Layer) or not layer.built:
            raise InputError(f"local_layers must be built Keras layers. Received: {layer!r}. Build the model first.")
    return [variable for layer in layer_list for variable in layer.trainable_weights]


def check_groups(num_groups: int, groups: int | Sequence[Any] | None) -> None:
    """Validates Horovod's arguments for groups, which have no effect, because tfdist forms the buckets."""
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
    if groups is not None and not isinstance(groups, list) and not (is_integer(groups) and groups > 0):
        raise InputError(
            f"groups must be a positive integer or a list of lists of variables. Received: {groups!r}. Remove it."
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
      legacy_opts: must be False, because Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise InputError("Keras 3 has no legacy optimizers. Received: legacy_opts=True. Remove it.")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
