"""Labels that are declared where a tensor is computed, instead of derived from its operations."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.row_semantics.labels import ALL_ROWS, ZEROS, Label, Partial, Replicated, Rows, is_zero, sum_power
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.values import Value

Declaration = Callable[..., Value]  # (value of each input) -> value of the tensor
_COLLECTION = "declared_row_labels"  # of a graph: (name of an operation, declaration, inputs)


def declare(tensor: tf.Tensor, declaration: Declaration, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the tensor with the label that `declaration` makes of those of `inputs`, tensors of the same graph."""
    with tf.control_dependencies(list(inputs)):
        declared = tf.identity(tensor)
    declared.graph.add_to_collection(_COLLECTION, (declared.op.name, declaration, list(inputs)))
    return declared


def declarations(graph: Any) -> dict[str, tuple[Declaration, list[tf.Tensor]]]:
    """Returns the declarations of a graph, by the name of the operation whose output they describe."""
    return {name: (declaration, inputs) for name, declaration, inputs in graph.get_collection(_COLLECTION)}


def row_wise(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Declares a function of rows, of replicated tensors and of variables to be one of each row, its gradient included.

    Args:
      function: takes tensors, the rows along their first axis, and returns one such tensor.
    """

    @tf.custom_gradient
    def declared(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        with tf.GradientTape(persistent=True) as tape:  # gradients may be differentiated, too
            tape.watch([each for each in inputs if each.dtype.is_floating])
            y = function(*inputs)

        def gradient(upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
            floating = [each for each in inputs if each.dtype.is_floating]
            found = tape.gradient(y, [*floating, *variables], upstream, unconnected_gradients="zero")
            of_inputs = [
                declare(tf.convert_to_tensor(each), _gradient, [source, upstream])
                for source, each in zip(floating, found, strict=False)
            ]
            by_input = iter(of_inputs)
            results = [next(by_input) if each.dtype.is_floating else None for each in inputs]
            totals = [declare(tf.convert_to_tensor(each), _sum_of_rows, [upstream]) for each in found[len(floating) :]]
            return (results, totals) if variables else results

        return declare(y, _like_rows, inputs), gradient

    return declared


def _gradient(source: Value, upstream: Value) -> Value:
    """Returns the gradient with respect to rows, or to what all rows are computed with."""
    return _sum_of_rows(upstream) if isinstance(source.label, Replicated) else _like_rows(upstream)


def _like_rows(*values: Value) -> Value:
    """Returns rows like those of the inputs, all of which must have them or be replicated."""
    rows = [value.label for value in values if isinstance(value.label, Rows)]
    others = [value.label for value in values if not isinstance(value.label, Rows)]
    if not rows:
        return Value(_same(others[0]) if len(set(others)) == 1 else ALL_ROWS)
    agrees = all(label.axis == 0 and label.size == rows[0].size for label in rows)
    power = rows[0].power if len(rows) == 1 else 0
    agrees = agrees and (len(rows) == 1 or not any(label.power for label in rows))
    agrees = agrees and all(_same(label) != ALL_ROWS for label in others)
    return Value(Rows(0, rows[0].size, power) if agrees else ALL_ROWS)


def _same(label: Label) -> Label:
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
    """A sum over replicas, for all rows, of which a replica keeps its own."""
    if is_zero(value.label):
        return Value(Rows(0, COUNT, None))
    return Value(Rows(0, COUNT) if sum_power(value.label) == 0 else ALL_ROWS)


def summed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor as if it had been summed over replicas; without a gradient."""
    return declare(tensor, lambda value: Value(_total(value.label), value.dims), [tensor])


def _total(label: Label) -> Label:
    return ZEROS if is_zero(label) else Replicated() if sum_power(label) == 0 else ALL_ROWS
