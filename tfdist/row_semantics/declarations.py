"""Labels that are declared where a tensor is computed, instead of derived from its operations."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.row_semantics.values import Value

Declaration = Callable[..., Value]  # the values of the inputs -> the value of the tensor
_ATTRIBUTE = "_declared_row_labels"  # of a graph: dict name of operation -> (declaration, inputs)


def declare(tensor: tf.Tensor, declaration: Declaration, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the tensor with the label that `declaration` makes of those of `inputs`, tensors of the same graph."""
    with tf.control_dependencies(list(inputs)):
        declared = tf.identity(tensor)
    graph: Any = declared.graph
    graph.__dict__.setdefault(_ATTRIBUTE, {})[declared.op.name] = (declaration, list(inputs))
    return declared


def declarations(graph: Any) -> dict[str, tuple[Declaration, list[tf.Tensor]]]:
    """Returns the declarations of a graph, by the name of the operation whose output they describe."""
    return graph.__dict__.get(_ATTRIBUTE, {})
