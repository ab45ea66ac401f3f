"""Dataflow of the graph that is being built: which variables it assigns, and which tensors depend on which."""

from collections.abc import Sequence

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, ops


def count_operations() -> int:
    """Returns the number of operations of the graph that is being built; 0 eagerly."""
    return 0 if tf.executing_eagerly() else len(ops.get_default_graph().get_operations())


def assigned_since(operations: int, variables: Sequence[keras.Variable | tf.Variable]) -> list[bool]:
    """Returns which variables may be assigned by the operations of the graph, from one on; eagerly, all may have been.

    Args:
      operations: an earlier result of `count_operations`.
      variables: variables that the graph reads; of a distributed one, the copy of this replica is meant.
    """
    if tf.executing_eagerly():
        return [True] * len(variables)
    graph = ops.get_default_graph()
    assigned: set[int] = set()
    for operation in graph.get_operations()[operations:]:
        _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        assigned.update(id(handle) for handle in written)
    return [id(graph.capture(handle)) in assigned for handle in _handles(variables)]


def feeds_back(
    results: Sequence[tf.Tensor], operations: int, variables: Sequence[keras.Variable | tf.Variable]
) -> list[bool]:
    """Returns which variables the operations of the graph, from one on, may assign, and may compute results with later.

    Args:
      results: tensors of the graph.
      operations: see `assigned_since`.
      variables: see `assigned_since`; eagerly, none is found.
    """
    if tf.executing_eagerly():
        return [False] * len(variables)
    assigned = assigned_since(operations, variables)
    if not any(assigned):
        return assigned
    graph = ops.get_default_graph()
    names = [graph.capture(handle).name for handle in _handles(variables)]
    needed = {tensor.name for tensor in results}
    steps = []
    for operation in reversed(graph.get_operations()[operations:]):
        _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        steps.append(({x.name for x in (*operation.outputs, *written)}, [tensor.name for tensor in operation.inputs]))
    known = None
    while known != (known := needed.intersection(names)):  # what is assigned to a variable is needed in the next step
        for given, taken in steps:
            if not needed.isdisjoint(given):
                needed.update(taken)
    return [is_assigned and name in needed for is_assigned, name in zip(assigned, names, strict=True)]


def _handles(variables: Sequence[keras.Variable | tf.Variable]) -> list[tf.Tensor]:
    """Returns the resources of variables; of distributed ones, of this replica's copies."""
    return [(variable._value if isinstance(variable, keras.Variable) else variable).handle for variable in variables]
