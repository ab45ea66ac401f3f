"""Labels that are declared where a tensor is computed, instead of derived from its operations."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.values import (
    ALL_ROWS,
    ZEROS,
    AllRows,
    Label,
    Partial,
    Replicated,
    Rows,
    Value,
    is_zero,
    sum_power,
    times_count,
)

Declaration = Callable[..., Value]  # (value of each input) -> value of the tensor
RowsTo = Literal["rows", "sum", "mean", "replicated"]
GRAPH = "row_labels"  # name of the graph in which code is labelled
_COLLECTION = "declared_row_labels"  # of a graph: (tensor, declaration, inputs)


def declare(tensor: tf.Tensor, declaration: Declaration, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the tensor with the label that `declaration` computes from those of `inputs`, tensors of the same graph."""
    with tf.control_dependencies(list(inputs)):
        declared = tf.identity(tensor)
    declared.graph.add_to_collection(_COLLECTION, (declared, declaration, list(inputs)))
    return declared


def declarations(graph: Any) -> dict[str, tuple[Declaration, list[tf.Tensor]]]:
    """Returns the declarations of a graph, by the name of the operation whose output they describe."""
    declared = graph.get_collection(_COLLECTION)  # includes those of branches and loops, which share the collection
    return {tensor.op.name: (declaration, inputs) for tensor, declaration, inputs in declared if tensor.graph is graph}


def row_wise(
    function: Callable[..., tf.Tensor],
    result: Declaration | None = None,
    of_rows: Callable[[Value], Value] = lambda upstream: upstream,
) -> Callable[..., tf.Tensor]:
    """Declares that a function of rows, replicated tensors and variables acts on each row separately, as does its gradient.

    Args:
      function: takes tensors, the rows along their first axis, and returns one such tensor.
      result: the value of what it returns, if that is not rows.
      of_rows: returns the gradient with respect to each row's part of the result, given that of the result.
    """
    result = result or _rows_value

    @tf.custom_gradient
    def declared(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        with tf.GradientTape(persistent=True) as tape:  # gradients may be differentiated, too
            tape.watch([each for each in inputs if each.dtype.is_floating])
            y = function(*inputs)

        def gradient(upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
            def declared_gradient(x: tf.Tensor, source: int | None) -> tf.Tensor:
                def declaration(dy: Value, *input_values: Value) -> Value:
                    if isinstance(result(*input_values).label, AllRows):
                        return Value(ALL_ROWS)
                    is_row = source is not None and not isinstance(input_values[source].label, Replicated)
                    return _like_rows(of_rows(dy)) if is_row else _sum_of_rows(of_rows(dy))

                return declare(x, declaration, [upstream, *inputs])

            numbers = [number for number, each in enumerate(inputs) if each.dtype.is_floating]
            sources = [*(inputs[number] for number in numbers), *variables]
            source_gradients = tape.gradient(y, sources, upstream, unconnected_gradients="zero")
            results: list[Any] = [None] * len(inputs)
            for number, each in zip(numbers, source_gradients, strict=False):
                results[number] = declared_gradient(tf.ensure_shape(each, inputs[number].shape), number)
            totals = [declared_gradient(tf.convert_to_tensor(each), None) for each in source_gradients[len(numbers) :]]
            return (results, totals) if variables else results

        return declare(y, result, inputs), gradient

    return declared


def register(*, rows_to: RowsTo) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares what a function computes from rows, where this cannot be derived, as for `tf.py_function` or a custom operation.

    Replicas rely on it, in Keras's `fit` and in a `tfdist.Trainer`. `tfdist verify` checks it on the first batch: the
    result for all rows against those for two parts of them.

    Args:
      rows_to: "rows" for a value of each row, along the first axis; "sum" or "mean" over rows; "replicated" for what does not
        depend on the rows.

    Returns:
      A decorator of a function that takes tensors, with the rows along their first axis or the same on all replicas, and
      returns a tensor.

    Raises:
      InputError: `rows_to` is something else.
    """
    if rows_to not in _DECLARED:
        raise InputError(f"`rows_to` must be one of {', '.join(_DECLARED)}. Received: {rows_to!r}.")

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def registered(*inputs: Any, **options: Any) -> Any:
            if getattr(tf.compat.v1.get_default_graph(), "name", "") == GRAPH:
                declared = row_wise(functools.partial(function, **options), *_DECLARED[rows_to])
                return declared(*map(tf.convert_to_tensor, inputs))
            y = function(*inputs, **options)
            if (limits := _checked.get()) and tf.executing_eagerly():
                _check(functools.partial(function, **options), inputs, y, rows_to, *limits)
            return y

        return registered

    return decorated


@contextlib.contextmanager
def checked(rows: int, tolerance: float) -> Iterator[None]:
    """Context in which eager calls of registered functions with a batch are checked; raises `InputError` if one is wrong."""
    token = _checked.set((rows, tolerance))
    try:
        yield
    finally:
        _checked.reset(token)


def _check(function: Any, inputs: Sequence[Any], y: Any, rows_to: str, rows: int, tolerance: float) -> None:
    """Compares the result of a function for all rows with those for two parts of them."""
    cut = -(-rows // 3)
    cuts = [
        [
            each[part] if each.shape.rank and each.shape[0] == rows else each
            for each in map(tf.convert_to_tensor, inputs)
        ]
        for part in (slice(cut), slice(cut, None))
    ]
    expected, first, second = np.asarray(y), *(np.asarray(function(*part)) for part in cuts)
    weights = {"sum": (1, 1), "mean": (cut / rows, 1 - cut / rows), "replicated": (0.5, 0.5)}.get(rows_to)
    joined = weights[0] * first + weights[1] * second if weights else np.concatenate([first, second])
    if joined.shape != expected.shape or np.linalg.norm(joined - expected) > tolerance * np.linalg.norm(expected):
        a, b, c, d = (np.array2string(value, threshold=4, edgeitems=1) for value in (expected, first, second, joined))
        raise InputError(
            f'A function must be what it is registered as. Received: {function.func.__name__}, rows_to="{rows_to}", which '
            f"returns {a} for {rows} rows, but {b} and {c} for {cut} and {rows - cut} of them, which make {d}. Register "
            "what it is, or leave it out: every replica then computes all rows."
        )


def _rows_value(*values: Value) -> Value:
    """Returns unscaled rows like those of the inputs, which must be unscaled, too; for zeros, the result need not be zeros."""
    label: Any = _like_rows(*values).label
    return Value(ALL_ROWS if getattr(label, "power", 1) else dataclasses.replace(label, power=0))


def _sum_value(power: int, *values: Value) -> Value:
    """Returns a sum over rows times COUNT^power."""
    return Value(Partial("sum", power) if _like_rows(*values).label == Rows(0, COUNT) else ALL_ROWS)


def _gradient_of_each(power: int, upstream: Value) -> Value:
    """Returns the gradient with respect to what each row adds to such a sum, given that of the sum."""
    label = times_count(upstream.label, power)
    return Value(Rows(0, COUNT, label.power) if isinstance(label, Replicated) else ALL_ROWS)


def _like_rows(*values: Value) -> Value:
    """Returns rows like those of the inputs, all of which must have them or be replicated."""
    rows = [value.label for value in values if isinstance(value.label, Rows)]
    others = [value.label for value in values if not isinstance(value.label, Rows)]
    if not rows:
        return Value(_unscaled_replicated(others[0]) if len(set(others)) == 1 else ALL_ROWS)
    agrees = all(label.axis == 0 and label.size == rows[0].size for label in rows)
    power = rows[0].power if len(rows) == 1 else 0
    agrees = agrees and (len(rows) == 1 or not any(label.power for label in rows))
    agrees = agrees and all(_unscaled_replicated(label) != ALL_ROWS for label in others)
    return Value(Rows(0, rows[0].size, power) if agrees else ALL_ROWS)


def _unscaled_replicated(label: Label) -> Label:
    return label if isinstance(label, Replicated) and not label.power else ALL_ROWS


def _sum_of_rows(value: Value) -> Value:
    label = value.label
    if is_zero(label):
        return Value(ZEROS)
    return Value(Partial("sum", label.power or 0) if isinstance(label, Rows) and not label.axis else ALL_ROWS)


def all_rows_of(rows: tf.Tensor, name: str, weight: tf.Tensor | None) -> tf.Tensor:
    """Returns rows as if those of all replicas had been gathered, with the gradient of that.

    Args:
      rows: tensor [rows, ...].
      name: name of the call.
      weight: by which each replica's loss is weighted after differentiation; None for 1.
    """

    @tf.custom_gradient
    def gathered(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            weighted = upstream if weight is None else upstream * tf.cast(weight, upstream.dtype)
            own = declare(weighted, _own_rows_of_sum, [weighted])
            return own if weight is None else own / tf.cast(weight, upstream.dtype)

        return declare(x, _gathered, [x]), gradient

    return gathered(tf.identity(rows, name=f"{name}/rows"))


def _gathered(value: Value) -> Value:
    label = value.label
    is_rows = isinstance(label, Rows) and not label.axis and not label.power and label.size == COUNT
    return Value(Replicated() if is_rows else ALL_ROWS)


def _own_rows_of_sum(value: Value) -> Value:
    """Returns a replica's own rows of a sum over replicas for all rows."""
    if is_zero(value.label):
        return Value(Rows(0, COUNT, None))
    return Value(Rows(0, COUNT) if sum_power(value.label) == 0 else ALL_ROWS)


def summed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor as if it had been summed over replicas; without a gradient."""
    return declare(tensor, lambda value: Value(_total(value.label), value.dims), [tensor])


def _total(label: Label) -> Label:
    return ZEROS if is_zero(label) else Replicated() if sum_power(label) == 0 else ALL_ROWS


_DECLARED: dict[str, tuple[Declaration, Callable[[Value], Value]]] = {
    "rows": (_rows_value, lambda upstream: upstream),
    "sum": (functools.partial(_sum_value, 0), functools.partial(_gradient_of_each, 0)),
    "mean": (functools.partial(_sum_value, -1), functools.partial(_gradient_of_each, -1)),
    "replicated": (lambda *_: Value(Replicated()), lambda _: Value(ALL_ROWS)),
}
_checked: contextvars.ContextVar[tuple[int, float] | None] = contextvars.ContextVar("checked", default=None)
