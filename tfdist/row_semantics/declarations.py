"""Declares labels of tensors, instead of deriving them from operations."""

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
    REPLICATED,
    ZEROS,
    AllRows,
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
GRAPH = "row_labels"  # name of the graph in which code is labeled
_COLLECTION = "declared_row_labels"  # collection in a graph of (tensor, declaration, inputs)


def declare(tensor: tf.Tensor, declaration: Declaration, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Labels a tensor with the result of `declaration` for the labels of `inputs`, tensors of the same graph."""
    with tf.control_dependencies(list(inputs)):
        labelled_tensor = tf.identity(tensor)
    labelled_tensor.graph.add_to_collection(_COLLECTION, (labelled_tensor, declaration, list(inputs)))
    return labelled_tensor


def declarations(graph: Any) -> dict[str, tuple[Declaration, list[tf.Tensor]]]:
    """Returns the declarations of a graph, by the name of the operation whose output they describe."""
    entries = graph.get_collection(_COLLECTION)  # branches and loops share the collection
    return {tensor.op.name: (declaration, inputs) for tensor, declaration, inputs in entries if tensor.graph is graph}


def row_wise(
    function: Callable[..., tf.Tensor],
    result: Declaration | None = None,
    row_gradient: Callable[[Value], Value] = lambda upstream: upstream,
) -> Callable[..., tf.Tensor]:
    """Declares that a function of rows, replicated tensors and variables acts on each row separately.

    Args:
      function: takes tensors with the rows along their first axis, and returns such a tensor.
      result: returns the abstract value of the result, given those of the inputs; rows by default.
      row_gradient: converts the abstract value of the gradient of the result to that of the gradient of each row's part.
    """
    result = result or _rows_value

    @tf.custom_gradient
    def labelled_function(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        with tf.GradientTape(persistent=True) as tape:  # for gradients of gradients
            tape.watch([x for x in inputs if x.dtype.is_floating])
            y = function(*inputs)

        def gradient(upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
            def declare_gradient(x: tf.Tensor, source: int | None) -> tf.Tensor:
                def declaration(dy: Value, *input_values: Value) -> Value:
                    if isinstance(result(*input_values).label, AllRows):
                        return Value(ALL_ROWS)
                    is_row = source is not None and not isinstance(input_values[source].label, Replicated)
                    return _rows_like(row_gradient(dy)) if is_row else _sum_of_rows(row_gradient(dy))

                return declare(x, declaration, [upstream, *inputs])

            numbers = [number for number, x in enumerate(inputs) if x.dtype.is_floating]
            sources = [*(inputs[number] for number in numbers), *variables]
            source_gradients = tape.gradient(y, sources, upstream, unconnected_gradients="zero")
            results: list[Any] = [None] * len(inputs)
            for number, x in zip(numbers, source_gradients, strict=False):
                results[number] = declare_gradient(tf.ensure_shape(x, inputs[number].shape), number)
            totals = [declare_gradient(tf.convert_to_tensor(x), None) for x in source_gradients[len(numbers) :]]
            return (results, totals) if variables else results

        return declare(y, result, inputs), gradient

    return labelled_function


def register(*, rows_to: RowsTo) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares what a function computes from rows, where it cannot be derived: in `tf.py_function` or a custom operation.

    Keras's `fit` and `tfdist.Trainer` rely on the declaration. `tfdist verify` checks it on the first batch: it compares the
    result for all rows with the results for two parts of them.

    Args:
      rows_to: "rows" for one value per row, along the first axis; "sum" or "mean" for a sum or mean over rows; "replicated"
        for a value that does not depend on the rows.

    Returns:
      A decorator for a function that takes tensors, with rows along the first axis or equal on all replicas, and returns a
      tensor.

    Raises:
      InputError: `rows_to` has another value.
    """
    if rows_to not in _DECLARATIONS:
        raise InputError(f"`rows_to` must be one of {', '.join(_DECLARATIONS)}. Received: {rows_to!r}.")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*inputs: Any, **options: Any) -> Any:
            if getattr(tf.compat.v1.get_default_graph(), "name", "") == GRAPH:
                labelled_function = row_wise(functools.partial(function, **options), *_DECLARATIONS[rows_to])
                return labelled_function(*map(tf.convert_to_tensor, inputs))
            y = function(*inputs, **options)
            if (limits := _check_limits.get()) and tf.executing_eagerly():
                _check(functools.partial(function, **options), inputs, y, rows_to, *limits)
            return y

        return wrapper

    return decorate


@contextlib.contextmanager
def check_declarations(rows: int, tolerance: float) -> Iterator[None]:
    """Context in which eager calls of registered functions raise `InputError` if their declaration is wrong."""
    token = _check_limits.set((rows, tolerance))
    try:
        yield
    finally:
        _check_limits.reset(token)


def _check(function: Any, inputs: Sequence[Any], y: Any, rows_to: str, rows: int, tolerance: float) -> None:
    """Compares the result of a function for all rows with its results for two parts of them."""
    cut = -(-rows // 3)
    parts = [
        [
            tensor[selection] if tensor.shape.rank and tensor.shape[0] == rows else tensor
            for tensor in map(tf.convert_to_tensor, inputs)
        ]
        for selection in (slice(cut), slice(cut, None))
    ]
    expected, first, second = np.asarray(y), *(np.asarray(function(*selection)) for selection in parts)
    weights = {"sum": (1, 1), "mean": (cut / rows, 1 - cut / rows), "replicated": (0.5, 0.5)}.get(rows_to)
    result = weights[0] * first + weights[1] * second if weights else np.concatenate([first, second])
    if result.shape != expected.shape or np.linalg.norm(result - expected) > tolerance * np.linalg.norm(expected):
        a, b, c, d = (np.array2string(value, threshold=4, edgeitems=1) for value in (expected, first, second, result))
        raise InputError(
            f'A function must match its registration. Received: {function.func.__name__}, rows_to="{rows_to}", which '
            f"returns {a} for {rows} rows, but {b} and {c} for {cut} and {rows - cut} of them, which make {d}. Correct "
            "`rows_to`, or remove the registration: every replica then computes all rows."
        )


def _rows_value(*values: Value) -> Value:
    """Returns rows like those of the inputs, which must not be scaled by COUNT; zeros may become nonzero."""
    label = _rows_like(*values).label
    return Value(ALL_ROWS if label.power or isinstance(label, AllRows) else dataclasses.replace(label, power=0))


def _sum_value(power: int, *values: Value) -> Value:
    """Returns a sum over rows times COUNT^power."""
    return Value(Partial("sum", power) if _rows_like(*values).label == Rows(0, COUNT) else ALL_ROWS)


def _gradient_of_row(power: int, upstream: Value) -> Value:
    """Returns the gradient with respect to each summand, given the gradient with respect to the sum times COUNT^power."""
    label = times_count(upstream.label, power)
    return Value(Rows(0, COUNT, label.power) if isinstance(label, Replicated) else ALL_ROWS)


def _rows_like(*values: Value) -> Value:
    """Returns rows like those of the inputs, each of which must be rows or replicated."""
    row_labels = [value.label for value in values if isinstance(value.label, Rows)]
    other_labels = {value.label for value in values if not isinstance(value.label, Rows)}
    if not all(isinstance(label, Replicated) and not label.power for label in other_labels):
        return Value(ALL_ROWS)
    if not row_labels:
        return Value(other_labels.pop() if len(other_labels) == 1 else ALL_ROWS)
    size, is_alone = row_labels[0].size, len(row_labels) == 1
    agrees = all(label.axis == 0 and label.size == size and (is_alone or not label.power) for label in row_labels)
    return Value(Rows(0, size, row_labels[0].power if is_alone else 0) if agrees else ALL_ROWS)


def _sum_of_rows(value: Value) -> Value:
    label = value.label
    if is_zero(label):
        return Value(ZEROS)
    return Value(Partial("sum", label.power or 0) if isinstance(label, Rows) and not label.axis else ALL_ROWS)


def all_rows_of(rows: tf.Tensor, name: str, weight: tf.Tensor | None) -> tf.Tensor:
    """Labels `rows`, [rows, ...], and their gradient as if the call `name` had gathered them from all replicas.

    `weight` is the weight of the replica's loss, applied after differentiation; None for 1.
    """

    @tf.custom_gradient
    def gather(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            weighted = upstream if weight is None else upstream * tf.cast(weight, upstream.dtype)
            local_rows = declare(weighted, _local_rows_of_sum, [weighted])
            return local_rows if weight is None else local_rows / tf.cast(weight, upstream.dtype)

        return declare(x, _gather_value, [x]), gradient

    return gather(tf.identity(rows, name=f"{name}/rows"))


def _gather_value(value: Value) -> Value:
    label = value.label
    is_rows = isinstance(label, Rows) and not label.axis and not label.power and label.size == COUNT
    return Value(REPLICATED if is_rows else ALL_ROWS)


def _local_rows_of_sum(value: Value) -> Value:
    """Returns this replica's rows of a tensor that has all rows and is summed over replicas."""
    if is_zero(value.label):
        return Value(Rows(0, COUNT, None))
    return Value(Rows(0, COUNT) if sum_power(value.label) == 0 else ALL_ROWS)


def declare_sum(tensor: tf.Tensor) -> tf.Tensor:
    """Labels a tensor as summed over replicas; it has no gradient."""

    def declaration(value: Value) -> Value:
        label = REPLICATED if sum_power(value.label) == 0 else ALL_ROWS
        return Value(ZEROS if is_zero(value.label) else label, value.dims)

    return declare(tensor, declaration, [tensor])


_DECLARATIONS: dict[str, tuple[Declaration, Callable[[Value], Value]]] = {
    "rows": (_rows_value, lambda upstream: upstream),
    "sum": (functools.partial(_sum_value, 0), functools.partial(_gradient_of_row, 0)),
    "mean": (functools.partial(_sum_value, -1), functools.partial(_gradient_of_row, -1)),
    "replicated": (lambda *_: Value(Replicated()), lambda _: Value(ALL_ROWS)),
}
_check_limits: contextvars.ContextVar[tuple[int, float] | None] = contextvars.ContextVar("checked", default=None)
