"""The labels of a traced function: its results, and the variables that it assigns."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.row_semantics.interpreter import Interpreter
from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, Label, Rows
from tfdist.row_semantics.sizes import COUNT, symbol
from tfdist.row_semantics.values import Value


class FunctionLabels(NamedTuple):
    """What a function makes of rows.

    Attributes:
      outputs: labels of the tensors that it returns, in the order of `tf.nest.flatten`.
      assigned: labels of the values of variables that it assigns, by the id of the captured resource.
      without_rule: types of operations without a rule.
    """

    outputs: Sequence[Label]
    assigned: Mapping[object, Label]
    without_rule: frozenset[str]


def label_function(function: Any) -> FunctionLabels:
    """Labels the results of a concrete function, whose arguments all have rows along their first axis, of unknown number.

    What it captures is replicated. No dim of its arguments is 0.
    """
    interpreter = Interpreter()
    values = interpreter.run(function.graph, argument_values(function))
    assigned = {key: value.known_label for key, value in interpreter.variables.items()}
    return FunctionLabels([value.known_label for value in values], assigned, frozenset(interpreter.without_rule))


def argument_values(function: Any) -> list[Value]:
    """Returns what is known of the inputs of a concrete function's graph before it runs."""
    captured = {id(inside): outside for outside, inside in function.graph.captures}
    return [_input(tensor, captured.get(id(tensor))) for tensor in function.graph.inputs]


def _input(tensor: tf.Tensor, captured: Any) -> Value:
    if captured is not None:
        return Value(REPLICATED, variable=id(captured) if tensor.dtype == tf.resource else None)
    if tensor.shape.rank == 0:
        return Value(REPLICATED)
    if tensor.shape.rank is None or tensor.shape[0] is not None:
        return Value(ALL_ROWS)  # a known number of rows is part of what was traced
    others = [symbol(tensor.name, is_positive=True) for _ in tensor.shape[1:]]
    return Value(Rows(0, COUNT), (COUNT, *others))
