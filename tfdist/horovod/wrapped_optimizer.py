"""Wraps an optimizer in a subclass of its class that reduces gradients; accumulates gradients locally."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.errors.formatting import is_integer
from tfdist.horovod.gradient_sums import Gradient, GradientSums, key_of


class Accumulation:
    """Sums the gradients of `passes` calls; divides the sum by their number for an `average`.

    Memory: one dense tensor of each variable's size.
    """

    def __init__(self, passes: int, average: bool):
        if not is_integer(passes) or passes < 1:
            raise InputError(f"backward_passes_per_step must be an integer of at least 1. Received: {passes!r}.")
        self.passes = int(passes)
        self._divisor = self.passes if average else 1
        self._sums: dict[int, tuple[Any, tf.Variable]] = {}  # of the variables that have had a gradient in any pass
        self._count: tf.Variable | None = None
        self._variables: tf.Variable | None = None  # their current number, which a graph may not know

    def empty_copy(self) -> "Accumulation":
        """Returns a new, empty accumulation with the same settings."""
        return Accumulation(self.passes, self._divisor > 1)

    def reset_state(self) -> None:
        """Discards the passes since the last update."""
        if self._count is not None:
            self._count.assign(0)
        self._reset()

    def add(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> tf.Tensor:
        """Adds one pass; returns whether it was the last one of a step, a scalar bool."""
        count = self._build(gradients, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                _, total = self._sums[key_of(variable)]
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        return tf.equal(count.assign((count + 1) % self.passes), 0)

    def pop_sums(self, variables: Sequence[Any]) -> tuple[list[Gradient], list[Any]]:
        """Returns the sums, or means, of a step and their variables; resets them, whatever their values (inf times 0 is not 0).

        The variables are those of the last pass, with None for those that have never had a gradient, and then all others
        that have had one in any pass, with zeros for those without a gradient in this step.
        """
        sums = {key: total for key, (_, total) in self._sums.items()}
        others = sums.keys() - {key_of(variable) for variable in variables}
        all_variables = [*variables, *(variable for key, (variable, _) in self._sums.items() if key in others)]
        with tf.control_dependencies([self._assert_all_traced()] if tf.inside_function() else []):
            values = {key: total.read_value() / self._divisor for key, total in sums.items()}
        with tf.control_dependencies(list(values.values())):
            self._reset()
        return [values.get(key_of(variable)) for variable in all_variables], all_variables

    def _reset(self) -> None:
        for _, total in self._sums.values():
            total.assign(tf.zeros(total.shape, total.dtype))

    def _assert_all_traced(self) -> tf.Operation:
        """Returns an assertion for a graph: it updates all variables that have had a gradient by the time it runs."""
        return tf.debugging.assert_equal(
            self._variables,
            len(self._sums),
            "backward_passes_per_step: a variable had its first gradient after this tf.function was traced, which would not "
            "update it. Pass zeros instead of None, or pass the variable's gradient to apply before the function is called",
        )

    def _build(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> tf.Variable:
        with tf.init_scope():
            if self._count is None or self._variables is None:
                self._count = tf.Variable(0, trainable=False, name="backward_passes")
                self._variables = tf.Variable(0, trainable=False, name="variables_with_gradients")
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None and key_of(variable) not in self._sums:
                    total = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                    self._sums[key_of(variable)] = variable, total
                    self._variables.assign(len(self._sums))
        return self._count


class Distributed:
    """Mixin for an optimizer's class: gradients are reduced over the ranks before the optimizer processes them.

    Clipping, loss scaling and weight decay therefore apply to reduced gradients. For Keras it is an optimizer of the
    original class: a model saved with it loads without tfdist.

    Attributes:
      reduction: reduces the gradients.
      accumulation: accumulates the gradients of several passes.
      local: variables whose gradients are not reduced, by `key_of`.
    """

    reduction: GradientSums
    accumulation: Accumulation
    local: set[int]

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces, then updates the variables; with `backward_passes_per_step` k, only on every k-th call."""
        variables = (
            keras_internals.trained_variables(self) if trainable_variables is None else list(trainable_variables)
        )
        base = super().apply  # type: ignore[misc]
        if self.accumulation.passes == 1:
            base(self.reduction(grads, variables, self.local), variables)
            return
        if not self.built:  # type: ignore[attr-defined]  # not in a condition
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]

        def update() -> tf.Tensor:
            sums, all_variables = self.accumulation.pop_sums(variables)
            base(self.reduction(sums, all_variables, self.local), all_variables)
            return tf.constant(True)

        tf.cond(self.accumulation.add(grads, variables), update, lambda: tf.constant(False))

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable's gradient from the reduction."""
        self.local.add(key_of(var))

    def synchronize(self) -> None:
        """Equalizes the compression's shared state over ranks and discards unapplied passes; all ranks must call it."""
        self.reduction.synchronize()
        self.accumulation.reset_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.Optimizer:
        """Returns a distributed copy, with the initial state of the compression and no unapplied passes."""
        reduction, accumulation = GradientSums(self.reduction.options), self.accumulation.empty_copy()
        return _wrap(cast(keras.Optimizer, self), reduction, accumulation, set(self.local))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `InputError`: pickled under its original class, it would be restored as an optimizer without reduction."""
        raise pickling_error(self)


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
    return _wrap(optimizer, reduction, accumulation, set())


def is_distributed(optimizer: Any) -> bool:
    """Returns whether an optimizer itself reduces gradients."""
    return isinstance(optimizer, Distributed)


def pickling_error(optimizer: Any) -> InputError:
    """Returns the error for pickling an optimizer that reduces gradients: the restored one would not."""
    return InputError(
        f"A distributed optimizer cannot be pickled. Received: {optimizer.__class__.__name__}. Pickle the optimizer "
        "that it wraps, or save the model and use hvd.load_model."
    )


def _wrap(
    optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation, local: set[int]
) -> keras.Optimizer:
    original_class = optimizer.__class__  # the plain class, even for a distributed optimizer
    # Keras saves an optimizer under its __class__, which must be a class that can be loaded.
    subclass = type(
        original_class.__name__,
        (Distributed, original_class),
        {"__class__": property(lambda self: original_class), "__doc__": original_class.__doc__},
    )
    try:
        wrapped = subclass.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    except (NotImplementedError, TypeError, ValueError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"An optimizer is wrapped through its get_config() and from_config(). Received: {original_class.__name__}, "
            f"{message[:200]} Define both for it and for its learning-rate schedule, and register them with keras.saving."
        ) from error
    wrapped.reduction, wrapped.accumulation, wrapped.local = reduction, accumulation, local
    if optimizer.built:
        wrapped.build(keras_internals.trained_variables(optimizer))
    for new, old in zip(wrapped.variables, optimizer.variables, strict=True):
        new.assign(old)
    _copy_attributes(wrapped, optimizer)
    return wrapped


def _copy_attributes(wrapped: keras.Optimizer, optimizer: keras.Optimizer) -> None:
    """Copies attributes set by calls after construction, such as `exclude_from_weight_decay`."""
    for name in vars(optimizer).keys() - vars(wrapped).keys():
        setattr(wrapped, name, getattr(optimizer, name))
    if hasattr(wrapped, "inner_optimizer"):
        _copy_attributes(wrapped.inner_optimizer, optimizer.inner_optimizer)
