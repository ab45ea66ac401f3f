"""The global weights, from which replicas start after an exchange, and the optimizer that updates them."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.grammar.spec import parse
from tfdist.optimizers.catalog import create_optimizer
from tfdist.step.side_effects import assign


class GlobalWeights:
    """A copy of the trainable weights that is equal on all replicas; memory: one variable per trainable variable.

    Attributes:
      copies: the copies, in the order of the weights.
      variables: the copies and the outer optimizer's state.
    """

    def __init__(self, weights: Sequence[keras.Variable], strategy: Strategy, outer: str):
        """Creates the variables, equal to zero; see `assign`.

        Args:
          weights: trainable variables of a built model, or some of them.
          strategy: their strategy.
          outer: the outer optimizer, as in `--optimizer`, with its learning rate; "" for none.
        """
        self._strategy, self._weights = strategy, list(weights)
        with strategy.scope():
            self.copies = [
                keras.Variable("zeros", shape=v.shape, dtype=v.dtype, trainable=False, name=_name(v)) for v in weights
            ]
            self._optimizer = outer_optimizer(outer)
            if self._optimizer is not None:
                self._optimizer.build(self.copies)
        self.variables = [*self.copies, *(self._optimizer.variables if self._optimizer else [])]

    @property
    def optimizer_variables(self) -> list[keras.Variable]:
        """Variables of the outer optimizer."""
        return self.variables[len(self.copies) :]

    def values(self) -> list[tf.Tensor]:
        """Returns the global weights. In a replica function."""
        return [tf.convert_to_tensor(copy.value) for copy in self.copies]

    def assign(self, values: Sequence[tf.Tensor]) -> None:
        """Assigns values that are equal on all replicas. In a replica function."""
        assign(self.copies, values)

    def take_over(self, weights: Sequence[keras.Variable]) -> None:
        """Assigns the replicas' weights, which are equal on all of them. In a replica function."""
        self.assign([tf.convert_to_tensor(variable.value) for variable in weights])

    def update(self, changes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Updates the global weights and returns them. In a replica function.

        Args:
          changes: global weights minus the mean of the replicas' weights: the outer optimizer's gradient.
        """
        if self._optimizer is None:
            self.assign([value - change for value, change in zip(self.values(), changes, strict=True)])
        else:
            self._strategy.apply(self._optimizer, changes, self.copies)
        if any(variable.constraint is not None for variable in self._weights):
            self.assign(constrained(self._weights, self.values()))
        return self.values()


def constrained(weights: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns values as the constraints of the weights, such as `non_neg`, require; a mean or a step may violate them."""
    pairs = zip(weights, values, strict=True)
    return [x if v.constraint is None else tf.convert_to_tensor(v.constraint(x)) for v, x in pairs]


def _name(variable: keras.Variable) -> str:
    return f"global_{variable.path.replace('/', '_')}"


def outer_optimizer(text: str) -> keras.Optimizer | None:
    """Creates an outer optimizer; None if there is none.

    Raises:
      InputError: there is no such optimizer, it does not take these arguments, accumulates gradients, or its state begins as
        a copy of the weights.
    """
    if not text:
        return None
    found = create_optimizer(text, parse(text).args["learning_rate"], flag="--sync: outer")
    if keras_internals.begins_at_weights(found):
        raise InputError(
            "The state of an outer optimizer cannot begin as a copy of the weights, which it receives later. Received: "
            f"outer={text}. Use another one, such as adam."
        )
    if found.gradient_accumulation_steps:
        raise InputError(
            f"An outer optimizer must update the weights in each exchange. Received: outer={text}. Leave out "
            "gradient_accumulation_steps, and use a longer period."
        )
    return found
