"""The table of rules, which map the abstract values of an operation's inputs to those of its outputs."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.row_semantics.values import REPLICATED, NoRuleError, Value


class Call(NamedTuple):
    """An operation with the abstract values of its inputs."""

    operation: tf.Operation
    inputs: Sequence[Value]
    variables: MutableMapping[object, Value]  # values of the variables that have been assigned

    @property
    def kind(self) -> str:
        """The type of the operation."""
        return self.operation.type

    @property
    def is_replicated(self) -> bool:
        """Whether all inputs are equal on all replicas and on one device."""
        return all(value.is_replicated for value in self.inputs)

    def attribute(self, name: str) -> Any:
        """Returns an attribute of the operation."""
        return self.operation.get_attr(name)

    def variable(self, number: int) -> Value:
        """Returns the value of the variable whose resource is the input with the index `number`."""
        key = self._key(number)
        return self.variables.get(key) or Value(REPLICATED, variable=key)

    def assign(self, number: int, value: Value) -> None:
        """Assigns a value to the variable whose resource is the input with the index `number`."""
        self.variables[self._key(number)] = value

    def _key(self, number: int) -> object:
        key = self.inputs[number].variable
        if key is None:
            raise NoRuleError("the variable is unknown")
        return key


Rule = Callable[[Call], Value | Sequence[Value]]
RULES: dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule for these types of operations.

    The rule returns a value for each output, or one for all outputs, and raises `NoRuleError` if it cannot derive a value.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(types, function))
        return function

    return register
