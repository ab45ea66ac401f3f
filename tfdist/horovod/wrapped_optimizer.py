"""Wraps an optimizer in a subclass that reduces gradients, and accumulates gradients locally."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError, is_integer
from tfdist.horovod.gradient_sums import Gradient, GradientSums, key_of
from tfdist.step import randomness


class Accumulation:
    """Sums the gradients of `passes` calls, or takes their mean (`average`).

    Memory: one dense tensor of the size of each variable.
    """

    def __init__(self, passes: int, average: bool):
        if not is_integer(passes) or passes < 1:
            raise InputError(f"backward_passes_per_step must be an integer of at least 1. Received: {passes!r}.")
        self.passes, self.average = int(passes), average
        self._sums: dict[int, tuple[Any, tf.Variable]] = {}  # variables that have had a gradient, and their sums
        self._count: tf.Variable | None = None
        self._variable_count: tf.Variable | None = None  # size of `_sums`, which may change after tracing

    def reset_state(self) -> None:
        """Discards the passes since the last update."""
        if self._count is not None:
            self._count.assign(0)
        self._reset()

    def add(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> tf.Tensor:
        """Adds the gradients of a pass; returns, as a scalar bool, whether the pass was the last one of a step."""
        with tf.init_scope():
            if self._count is None or self._variable_count is None:
                self._count = tf.Variable(0, trainable=False, name="backward_passes")
                self._variable_count = tf.Variable(0, trainable=False, name="variables_with_gradients")
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None and key_of(variable) not in self._sums:
                    total = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                    self._sums[key_of(variable)] = variable, total
                    self._variable_count.assign(len(self._sums))
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                _, total = self._sums[key_of(variable)]
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        return tf.equal(self._count.assign((self._count + 1) % self.passes), 0)

    def pop_sums(self, variables: Sequence[Any]) -> tuple[list[Gradient], list[Any]]:
        """Returns the sums, or means, of a step and their variables, and resets the sums.

        The variables of the last pass come first, with None for variables that have never had a gradient. All other variables
        that have had a gradient in any pass follow, with zeros if they had none in this step.
        """
        sums = {key: total for key, (_, total) in self._sums.items()}
        keys = {key_of(variable) for variable in variables}
        all_variables = [*variables, *(variable for key, (variable, _) in self._sums.items() if key not in keys)]
        assertions = []
        if tf.inside_function():
            text = (
                "backward_passes_per_step: a variable had its first gradient after this tf.function was traced, which would "
                "not update it. Pass zeros instead of None, or pass the variable's gradient to apply before the function is "
                "called"
            )
            assertions = [tf.debugging.assert_equal(self._variable_count, len(self._sums), text)]
        with tf.control_dependencies(assertions):
            divisor = self.passes if self.average else 1
            values = {key: total.read_value() / divisor for key, total in sums.items()}
        with tf.control_dependencies(list(values.values())):
            self._reset()
        return [values.get(key_of(variable)) for variable in all_variables], all_variables

    def _reset(self) -> None:
        for _, total in self._sums.values():
            total.assign(tf.zeros(total.shape, total.dtype))  # not a product with 0, which keeps NaN


class Distributed:
    """A mixin for optimizers that reduces gradients over the ranks before the optimizer processes them.

    Clipping, loss scaling and weight decay therefore apply to reduced gradients. Keras saves the optimizer under its original
    class, and can load the model without tfdist.
    """

    reduction: GradientSums
    accumulation: Accumulation  # accumulates the gradients of several passes
    local_keys: set[int]  # keys of variables whose gradients are not reduced; see `key_of`

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduces the gradients and updates the variables; with `backward_passes_per_step` k, on every k-th call only."""
        variables = (
            keras_internals.trained_variables(self) if trainable_variables is None else list(trainable_variables)
        )
        base = super().apply  # type: ignore[misc]
        if self.accumulation.passes == 1:
            base(self.reduction(grads, variables, self.local_keys), variables)
            return
        if not self.built:  # type: ignore[attr-defined]  # not in a condition
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]

        def update() -> tf.Tensor:
            sums, all_variables = self.accumulation.pop_sums(variables)
            base(self.reduction(sums, all_variables, self.local_keys), all_variables)
            return tf.constant(True)

        tf.cond(self.accumulation.add(grads, variables), update, lambda: tf.constant(False))

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self.local_keys.add(key_of(var))

    def reset_state(self) -> None:
        """Resets the compression's state and discards unapplied passes; all ranks must call it."""
        self.reduction.reset_state()
        self.accumulation.reset_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.Optimizer:
        """Returns a distributed copy, with the initial state of the compression and no unapplied passes."""
        accumulation = Accumulation(self.accumulation.passes, self.accumulation.average)
        reduction = GradientSums(self.reduction.options)
        return _wrap(cast(keras.Optimizer, self), reduction, accumulation, set(self.local_keys))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `InputError`, because the optimizer would be restored without reduction."""
        raise InputError(
            f"A distributed optimizer cannot be pickled. Received: {self.__class__.__name__}. Pickle the optimizer that it "
            "wraps, or save the model and use hvd.load_model."
        )


def wrap_optimizer(optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation) -> keras.Optimizer:
    """Returns a copy of an optimizer that reduces gradients; copies its variables if it is built.

    Raises:
      InputError: the optimizer is not a Keras 3 optimizer, or already reduces gradients.
    """
    if not isinstance(optimizer, keras.Optimizer):
        raise InputError(
            f"The optimizer must be a Keras 3 optimizer. Received: {type(optimizer).__name__}. Use one of keras.optimizers."
        )
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise InputError("The optimizer must not be distributed yet. Received: a distributed optimizer. Wrap it once.")
    return _wrap(optimizer, reduction, accumulation, set())


def shared_variables(model: keras.Model, optimizer: keras.Optimizer) -> list[Any]:
    """Returns the variables of a model and its optimizer, which is built if necessary, without states of random layers."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    seeds = {id(state) for state in randomness.seed_states(model)}
    return [*(variable for variable in model.variables if id(variable) not in seeds), *optimizer.variables]


def is_distributed(optimizer: Any) -> bool:
    """Returns whether an optimizer itself reduces gradients."""
    return isinstance(optimizer, Distributed)


def _wrap(
    optimizer: keras.Optimizer, reduction: GradientSums, accumulation: Accumulation, local_keys: set[int]
) -> keras.Optimizer:
    original_class = optimizer.__class__  # even for a distributed optimizer
    # Keras saves an optimizer under its __class__, which Keras must be able to load.
    subclass = type(
        original_class.__name__,
        (Distributed, original_class),
        {"__class__": property(lambda self: original_class), "__doc__": original_class.__doc__},
    )
    try:
        new_optimizer = subclass.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    except (NotImplementedError, TypeError, ValueError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"An optimizer is wrapped through its get_config() and from_config(). Received: {original_class.__name__}, "
            f"{message[:200]} Define both for it and for its learning-rate schedule, and register them with keras.saving."
        ) from error
    new_optimizer.reduction, new_optimizer.accumulation, new_optimizer.local_keys = reduction, accumulation, local_keys
    if optimizer.built:
        new_optimizer.build(keras_internals.trained_variables(optimizer))
    for target, source in zip(new_optimizer.variables, optimizer.variables, strict=True):
        target.assign(source)
    _copy_later_attributes(new_optimizer, optimizer)
    return new_optimizer


def _copy_later_attributes(target: keras.Optimizer, source: keras.Optimizer) -> None:
    """Copies attributes set after construction, as by `exclude_from_weight_decay`."""
    for name in vars(source).keys() - vars(target).keys():
        setattr(target, name, getattr(source, name))
    if hasattr(target, "inner_optimizer"):
        _copy_later_attributes(target.inner_optimizer, source.inner_optimizer)
