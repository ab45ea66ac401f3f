"""Operations on operands of all labels: for each type with a rule, calls whose results depend on the rule.

Each call of `operations.tsv` is tried with all combinations of operands that TensorFlow accepts: many in one graph, since the
oracle looks at every tensor.
"""

import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

raw: Any = tf.raw_ops
SPECS = (tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None,), tf.int32))


def _lines(name: str) -> list[list[str]]:
    return [line.split("\t") for line in pathlib.Path(__file__).with_name(name).read_text("utf-8").splitlines()]


def operands(x: tf.Tensor, labels: tf.Tensor, vector: tf.Tensor) -> dict[str, list[tf.Tensor]]:
    """Returns tensors by a letter: f(loats), i(ntegers), b(ooleans), (imag)e(s), a(xes); for a capital, one of each label."""
    count = tf.shape(x)[0]
    number, numbers = tf.cast(count, tf.float64), tf.cast(tf.round(x * 2), tf.int32)
    matrix = tf.constant([[0.5, -1, 2], [1, 0, 0.25], [-2, 1, 1]], tf.float64)
    length = tf.cast(tf.reduce_sum(vector) + 1.5, tf.int32)  # 3, but unknown
    known = NAMES | locals()
    known["images"] = x[:, None, None] * NAMES["kernel"](2, 2, 1)
    found: dict[str, list[tf.Tensor]] = {}
    for letter, _, expressions in _lines("operands.tsv"):
        tensors = eval(f"[{expressions}]", known)
        found.setdefault(letter, []).extend(tensors)
        found.setdefault(letter.upper(), []).append(tensors[0])
    return found


def elementwise(kind: str) -> tuple[str, Callable[..., Any]]:
    """Returns the letters and the call of an operation whose operands are broadcast."""
    definition = op_def_registry.get(kind)
    types = {each.name: each.allowed_values.list.type for each in definition.attr}
    letters, agree = "", NAMES["same" if kind.endswith("Grad") else "fits"]
    for argument in definition.input_arg:
        allowed = types.get(argument.type_attr) or [argument.type] * (not argument.type_attr)
        letters += "F" if not allowed or tf.float64.as_datatype_enum in allowed else "B" if 10 in allowed else "I"

    def call(*tensors: tf.Tensor) -> Any:
        named = {argument.name: each for argument, each in zip(definition.input_arg, tensors, strict=True)}
        return getattr(raw, kind)(**named) if agree(*tensors) else []

    return letters, call


def gradients(call: Callable[..., Any], *operands: tf.Tensor) -> list[Any]:
    """Returns the results of a call, their gradients, and those of their squares."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(operands)
        results = tf.nest.flatten(call(*operands))
        squares = [tf.reduce_mean(each * each) for each in results]
    return [*results, *[tape.gradient(each, operands) for each in (*results, *squares)]]


def assigned(variable: tf.Variable, *changes: Callable[[tf.Variable], Any]) -> list[tf.Tensor]:
    """Returns a variable's value after each change; it is the same before and after."""
    value, results = variable.read_value(), []
    for change in changes:
        change(variable)
        results += [variable.read_value(), 2 * variable, variable + tf.constant([1.0, 0, 0], tf.float64)]
    variable.assign(value)
    return results


def gathered(variable: tf.Variable, value: tf.Tensor, gather: Callable[[tf.Variable], tf.Tensor]) -> list[tf.Tensor]:
    """Returns what is gathered from a variable before a value is assigned to it, and afterwards; it is set back."""
    before, old = gather(variable), variable.read_value()
    variable.assign(value)
    after = gather(variable)
    variable.assign(old)
    return [before, after]


def calls() -> dict[str, list[tuple[str, Callable[..., Any]]]]:
    """Returns for each type of operation calls, and the letters of their operands."""
    table: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
    for kinds, letters, expression in _lines("operations.tsv"):
        for kind in kinds.split():
            call = elementwise(kind) if not letters else (letters.strip("-"), _call(kind, expression))
            table.setdefault(kind, []).append(call)
    return table


def _call(kind: str, expression: str) -> Callable[..., Any]:
    code, names = compile(expression, kind, "eval"), NAMES | {"kind": getattr(raw, kind, None)}
    return lambda *operands: eval(code, names | dict(zip("xyz", operands, strict=False)))


def results(tensors: dict[str, list[tf.Tensor]], letters: str, call: Callable[..., Any]) -> Iterator[Any]:
    """Returns the results of a call on all combinations of operands that TensorFlow accepts."""
    for chosen in itertools.product(*(tensors[letter] for letter in letters)):
        try:
            yield call(*chosen)
        except (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError):
            continue


def of_calls(*chosen: tuple[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns the function of all results of calls, for `oracle.Traced`."""

    def function(x: tf.Tensor, labels: tf.Tensor) -> Any:
        tensors = operands(x, labels, NAMES["VARIABLE"].read_value())
        found = tf.nest.flatten([list(results(tensors, letters, call)) for letters, call in chosen])
        return [each for each in found if isinstance(each, tf.Tensor) and each.dtype != tf.variant]

    return function


# What expressions may name: also a variable, a table and the functions of `functions.tsv`.
NAMES: dict[str, Any] = globals() | {"re": re}
for _name, _expression in _lines("functions.tsv"):
    NAMES[_name] = eval(_expression, NAMES)
