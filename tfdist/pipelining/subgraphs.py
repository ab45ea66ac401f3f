"""Parts of a traced function as functions of their own: each operation belongs to one of them, and is not traced again."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras_internals

Operations = frozenset[tf.Operation]
_READS = ("ReadVariableOp", "ResourceGather", "VariableShape")  # stateful, but their only effect is their result


def operations_before(
    targets: Iterable[tf.Tensor | tf.Operation], without: Collection[tf.Operation] = ()
) -> Operations:
    """Returns the operations of a graph that targets need, also as control inputs, with those that compute the targets.

    Args:
      targets: tensors or operations.
      without: operations that are left out, with those that only they need.
    """
    waiting = [target.op if isinstance(target, tf.Tensor) else target for target in targets]
    found: set[tf.Operation] = set()
    while waiting:
        operation = waiting.pop()
        if operation not in found and operation not in without:
            found.add(operation)
            waiting += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return frozenset(found)


def with_effects(graph: tf.Graph, excluded: Collection[tf.Operation] = ()) -> list[tf.Operation]:
    """Returns the operations of a function's graph that run even if nothing needs their results."""
    return [x for x in graph.control_outputs if x not in excluded and x.type not in _READS]


def constants_among(operations: Iterable[tf.Operation]) -> Operations:
    """Returns the constants, which several parts may contain."""
    return frozenset(operation for operation in operations if operation.type == "Const")


def inputs_of(operations: Operations, outputs: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors from other operations that these operations, or the outputs of their part, are made of."""
    used = [tensor for operation in operations for tensor in operation.inputs]
    needed = {tensor.name: tensor for tensor in [*used, *outputs] if tensor.op not in operations}
    return [needed[name] for name in sorted(needed)]


def extracted(
    graph: tf.Graph,
    operations: Operations,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    values: Mapping[str, Any],
) -> tf.types.experimental.ConcreteFunction:
    """Returns a part of a graph as a function from its inputs to its outputs.

    Args:
      graph: the graph, which must live as long as the function.
      operations: the part.
      inputs: tensors of other operations, which become arguments.
      outputs: results of the operations, or inputs.
      values: by their names in the graph, what else the operations use: variables' handles, which the function captures, and
        constants.
    """
    definition = _definition(graph, operations)
    effects = [operation.name for operation in with_effects(graph) if operation in operations]
    inner = [tensor for tensor in outputs if tensor.op in operations]

    def part(*arguments: tf.Tensor) -> list[tf.Tensor]:
        used = {tensor.name for operation in operations for tensor in operation.inputs}
        given = {name: _captured(value) for name, value in values.items() if name in used}
        given |= {tensor.name: argument for tensor, argument in zip(inputs, arguments, strict=True)}
        keras_internals.add_functions(graph)
        found = tf.graph_util.import_graph_def(
            definition,
            {name: tensor for name, tensor in given.items() if name in used},
            [*(tensor.name for tensor in inner), *effects],
            name="part",
        )
        with tf.control_dependencies(found[len(inner) :]):
            tf.compat.v1.get_default_graph().control_outputs.append(tf.no_op())
        for tensor, value in zip(inner, found[: len(inner)], strict=True):
            value.set_shape(tensor.shape)
            given[tensor.name] = value
        return [tf.identity(given[tensor.name]) for tensor in outputs]

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    return tf.function(part, autograph=False).get_concrete_function(*specs)


def _captured(value: Any) -> tf.Tensor:
    """Returns a tensor of the current function's graph."""
    return tf.compat.v1.get_default_graph().capture(value) if isinstance(value, tf.Tensor) else tf.constant(value)


def _definition(graph: tf.Graph, operations: Operations) -> tf.compat.v1.GraphDef:
    """Returns the definition of operations, without control inputs from others, and without wishes of colocation."""
    whole, names = graph.as_graph_def(), {operation.name for operation in operations}
    found = tf.compat.v1.GraphDef(versions=whole.versions)
    for node in whole.node:
        if node.name in names:
            kept = [name for name in node.input if not name.startswith("^") or name[1:] in names]
            node.attr.pop("_class", None)
            copy = found.node.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(kept)
    return found
