"""What makes an optimizer distributed: a subclass of its own class, made when it is wrapped."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.horovod.accumulation import Accumulation
from tfdist.horovod.gradient_sums import Gradient, GradientSums, LocalVariables


class Distributed:
    """Mixed into an optimizer's class: gradients are reduced over the ranks before the optimizer sees them.

    So clipping, loss scaling and weight decay work on whole gradients. To Keras the optimizer is one of its own class: what
    is saved with it loads without tfdist.
    """

    reduction: GradientSums
    accumulation: Accumulation
    local: LocalVariables

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces, then updates the variables; with `backward_passes_per_step` on each k-th call only."""
        given = trainable_variables is not None
        variables = list(trainable_variables or []) if given else keras_internals.trained_by(self)
        base = super().apply  # type: ignore[misc]
        if self.accumulation.passes == 1:
            base(self.reduction(grads, variables, self.local), variables)
            return
        if not self.built:  # type: ignore[attr-defined]  # a condition is no place for new variables
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]

        def update() -> tf.Tensor:
            sums = self.accumulation.taken(grads, variables)
            base(self.reduction(sums, variables, self.local), variables)
            return tf.constant(True)

        tf.cond(self.accumulation.add(grads, variables), update, lambda: tf.constant(False))

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's variables; the list may be called, as Horovod's scripts do."""
        return _CallableList(super().variables)  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:
        """Lets a variable's gradient be each rank's own."""
        self.local.add(var)


class _CallableList(list):
    """A list that returns itself when it is called: `optimizer.variables()` was a method once."""

    def __call__(self) -> "_CallableList":
        return self


def distributed(optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation) -> keras.Optimizer:
    """A copy of an optimizer, with its slots if it has been built, that reduces gradients.

    Raises:
      InputError: it is not one of Keras 3, or reduces gradients already.
    """
    if not isinstance(optimizer, keras.Optimizer):
        raise InputError(
            f"The optimizer must be one of Keras 3. Received: {type(optimizer).__name__}. Use one of keras.optimizers."
        )
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise InputError("The optimizer is distributed already. Received: a wrapped one. Wrap it once.")
    kind = type(optimizer)
    # Keras saves an optimizer under its __class__: with that, what is saved names a class that can be loaded.
    own = type(kind.__name__, (Distributed, kind), {"__class__": property(lambda self: kind), "__doc__": kind.__doc__})
    made = own.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    made.reduction, made.accumulation, made.local = reduction, accumulation, LocalVariables()
    if optimizer.built:
        made.build(keras_internals.trained_by(optimizer))
        for new, old in zip(made.variables, optimizer.variables, strict=True):
            new.assign(old)
    return made


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer reduces gradients by itself."""
    return isinstance(optimizer, Distributed)
