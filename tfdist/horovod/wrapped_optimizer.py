"""Makes an optimizer distributed, as an instance of a subclass of its class created on wrapping."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.horovod.accumulation import Accumulation
from tfdist.horovod.gradient_sums import Gradient, GradientSums, LocalVariables


class Distributed:
    """Mixin for an optimizer's class: gradients are reduced over the ranks before the optimizer processes them.

    So clipping, loss scaling and weight decay apply to reduced gradients. Keras sees an optimizer of the original
    class: a model saved with it loads without tfdist.
    """

    reduction: GradientSums
    accumulation: Accumulation
    local: LocalVariables

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces, then updates the variables; with `backward_passes_per_step` k, only on every k-th call."""
        given = trainable_variables is not None
        variables = list(trainable_variables or []) if given else keras_internals.trained_by(self)
        base = super().apply  # type: ignore[misc]
        if self.accumulation.passes == 1:
            base(self.reduction(grads, variables, self.local), variables)
            return
        if not self.built:  # type: ignore[attr-defined]  # not in a condition
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]

        def update() -> tf.Tensor:
            sums, every = self.accumulation.taken(variables)
            base(self.reduction(sums, every, self.local), every)
            return tf.constant(True)

        tf.cond(self.accumulation.add(grads, variables), update, lambda: tf.constant(False))

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable's gradient from the reduction."""
        self.local.add(var)

    def synchronize(self) -> None:
        """Equalizes the compression's shared state over ranks and discards unapplied passes; all ranks must call it."""
        self.reduction.synchronize()
        self.accumulation.begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.Optimizer:
        """Returns a distributed copy, with the initial state of the compression and no unapplied passes."""
        local = LocalVariables(self.local)
        return _made(cast(keras.Optimizer, self), GradientSums(self.reduction.options), self.accumulation.anew(), local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `InputError`: pickled under the class that Keras sees, it would be restored as a plain optimizer."""
        raise not_pickled(self)


def distributed(optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation) -> keras.Optimizer:
    """Returns a copy of an optimizer, with its variables if it is built, that reduces gradients.

    Args:
      optimizer: a Keras 3 optimizer.
      reduction: reduces the gradients.
      accumulation: accumulates the gradients of several passes.

    Raises:
      InputError: it is not a Keras 3 optimizer, or reduces gradients already.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise InputError(
            "Optimizers of TensorFlow 1 need its graphs and sessions. Received: tf.compat.v1.train."
            f"{type(optimizer).__name__}. Use one of keras.optimizers, in model.fit or in a loop of your own."
        )
    if not isinstance(optimizer, keras.Optimizer):
        raise InputError(
            f"The optimizer must be one of Keras 3. Received: {type(optimizer).__name__}. Use one of keras.optimizers."
        )
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise InputError("The optimizer is already distributed. Received: a wrapped one. Wrap it once.")
    return _made(optimizer, reduction, accumulation, LocalVariables())


def is_distributed(optimizer: Any) -> bool:
    """Returns whether an optimizer itself reduces gradients."""
    return isinstance(optimizer, Distributed)


def not_pickled(optimizer: Any) -> InputError:
    """Returns the error for pickling an optimizer that reduces gradients: the restored one would not."""
    return InputError(
        f"A distributed optimizer cannot be pickled. Received: {optimizer.__class__.__name__}. Pickle the optimizer "
        "that it wraps, or save the model and use hvd.load_model."
    )


def _made(
    optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation, local: LocalVariables
) -> keras.Optimizer:
    kind = optimizer.__class__  # the plain class, even for a distributed optimizer
    # Keras saves an optimizer under its __class__: this way, a saved model names a class that can be loaded.
    own = type(kind.__name__, (Distributed, kind), {"__class__": property(lambda self: kind), "__doc__": kind.__doc__})
    try:
        made = own.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    except (NotImplementedError, TypeError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"An optimizer is wrapped through its get_config() and from_config(). Received: {kind.__name__}, "
            f"{said[:200]} Define both for it and for its learning-rate schedule, and register them with keras.saving."
        ) from error
    made.reduction, made.accumulation, made.local = reduction, accumulation, local
    if optimizer.built:
        made.build(keras_internals.trained_by(optimizer))
    for new, old in zip(made.variables, optimizer.variables, strict=True):
        new.assign(old)
    _take_over(made, optimizer)
    return made


def _take_over(made: keras.Optimizer, optimizer: keras.Optimizer) -> None:
    """Copies attributes set by calls after construction, such as `exclude_from_weight_decay`."""
    for name in vars(optimizer).keys() - vars(made).keys():
        setattr(made, name, getattr(optimizer, name))
    if hasattr(made, "inner_optimizer"):
        _take_over(made.inner_optimizer, optimizer.inner_optimizer)
