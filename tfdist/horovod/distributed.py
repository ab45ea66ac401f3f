"""What makes an optimizer distributed: a subclass of its own class, made when it is wrapped."""

from collections.abc import Sequence
from typing import Any, cast

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

    def register_local_var(self, var: Any) -> None:
        """Lets a variable's gradient be each rank's own."""
        self.local.add(var)

    def synchronize(self) -> None:
        """Makes what compression remembers equal on all ranks, and forgets passes that are not applied; all call it."""
        self.reduction.synchronize()
        self.accumulation.begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.Optimizer:
        """A copy that is distributed too; what compression remembers and passes that are not applied start anew."""
        local = LocalVariables(self.local)
        return _made(cast(keras.Optimizer, self), GradientSums(self.reduction.options), self.accumulation.anew(), local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `InputError`: pickled under the class that Keras sees, the optimizer would come back as a plain one."""
        raise not_pickled(self)


def distributed(optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation) -> keras.Optimizer:
    """A copy of an optimizer, with its slots if it has been built, that reduces gradients.

    Raises:
      InputError: it is not one of Keras 3, or reduces gradients already.
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
        raise InputError("The optimizer is distributed already. Received: a wrapped one. Wrap it once.")
    return _made(optimizer, reduction, accumulation, LocalVariables())


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer reduces gradients by itself."""
    return isinstance(optimizer, Distributed)


def not_pickled(optimizer: Any) -> InputError:
    """The error of pickling an optimizer that reduces gradients, which its pickle would not."""
    return InputError(
        f"A distributed optimizer cannot be pickled. Received: {optimizer.__class__.__name__}. Pickle the optimizer that it "
        "was made of, or save the model and use hvd.load_model."
    )


def _made(
    optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation, local: LocalVariables
) -> keras.Optimizer:
    kind = optimizer.__class__  # that of a distributed one is its plain class
    # Keras saves an optimizer under its __class__: with that, what is saved names a class that can be loaded.
    own = type(kind.__name__, (Distributed, kind), {"__class__": property(lambda self: kind), "__doc__": kind.__doc__})
    try:
        made = own.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    except (NotImplementedError, TypeError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"An optimizer is wrapped by way of get_config() and from_config(). Received: {kind.__name__}, {said[:200]} "
            "Give it and its learning rate's schedule both, and register them with keras.saving."
        ) from error
    made.reduction, made.accumulation, made.local = reduction, accumulation, local
    if optimizer.built:
        made.build(keras_internals.trained_by(optimizer))
    for new, old in zip(made.variables, optimizer.variables, strict=True):
        new.assign(old)
    _take_over(made, optimizer)
    return made


def _take_over(made: keras.Optimizer, optimizer: keras.Optimizer) -> None:
    """Gives a copy what calls have added since the optimizer was made: `exclude_from_weight_decay`."""
    for name in vars(optimizer).keys() - vars(made).keys():
        setattr(made, name, getattr(optimizer, name))
    if hasattr(made, "inner_optimizer"):
        _take_over(made.inner_optimizer, optimizer.inner_optimizer)
