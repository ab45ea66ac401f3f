"""Accesses internals of functional and sequential models: their graphs of operations, and assignments in traced graphs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.models.functional import Functional, operation_fn, unpack_singleton
from tensorflow.python.framework import auto_control_deps_utils, ops

from tfdist.keras_internals.variables import RecordedScope

_KERAS_CALLS = (Functional.call, keras.Sequential.call)


class GraphNode(NamedTuple):
    """One call of an operation in a functional model."""

    operation: keras.Operation  # a layer that is called twice has two nodes
    inputs: Sequence[keras.KerasTensor]  # the symbolic tensors among the arguments
    outputs: Sequence[keras.KerasTensor]  # the flattened outputs
    kwargs: Mapping[str, Any]  # keyword arguments, which may contain symbolic tensors
    # Returns the positional and keyword arguments, given tensors by the id of the symbolic tensor.
    fill_in: Callable[[Mapping[int, Any]], tuple[Sequence[Any], dict[str, Any]]]


def functional_of(model: Any) -> keras.Model | None:
    """Returns the functional model that a call of a model runs; None if there is none.

    This is the model itself if it is functional, and an inner model if it is sequential and its input shape is known.
    Subclasses that override `call` have none.
    """
    if getattr(type(model), "call", None) not in _KERAS_CALLS or "call" in vars(model):
        return None
    return model._functional if isinstance(model, keras.Sequential) else model


def input_names(functional: keras.Model) -> list[str]:
    """Returns the names of the inputs of a functional model."""
    return [x._keras_history.operation.name for x in functional.inputs]


def is_transparent(model: keras.Model) -> bool:
    """Returns whether a call of a nested model is equivalent to separate calls of its operations."""
    kind = type(model)
    return (
        functional_of(model) is not None
        and kind.__call__ is keras.Layer.__call__
        and kind.compute_mask is keras.Layer.compute_mask
        and model._remat_mode is None
        and model.activity_regularizer is None
    )


def is_rematerialized(operation: keras.Operation) -> bool:
    """Returns whether an operation is recomputed in the backward pass, so that only its inputs are stored."""
    return operation._remat_mode is not None


def nodes_of(functional: keras.Model) -> Iterator[GraphNode]:
    """Yields the calls of a functional model, except those of its input layers, in the order in which Keras runs them."""
    by_depth = functional._nodes_by_depth
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.operation and not node.is_input:
                arguments = node.arguments
                yield GraphNode(node.operation, node.input_tensors, node.outputs, arguments.kwargs, arguments.fill_in)


operation_function = operation_fn  # returns a function that calls an operation in the same way as a functional model


def standardize_inputs(model: keras.Model, inputs: Any, mask: Any = None) -> list[Any]:
    """Returns the flattened inputs of a functional or sequential model with the model's dtypes and ranks, and with masks.

    `inputs` and `mask` are those of a call of the model; if `mask` is None, the inputs keep their masks.
    """
    masks = keras.tree.flatten(mask)
    if all(x is None for x in masks):
        masks = [get_keras_mask(x) for x in keras.tree.flatten(inputs)]
    if model._convert_input_args:
        inputs = keras.tree.map_structure(lambda x: _convert_input(model, x), inputs)
    functional = functional_of(model)
    assert functional is not None
    standardized_inputs = functional._standardize_inputs(inputs)
    for x, input_mask in zip(standardized_inputs, masks, strict=False):
        if input_mask is not None:
            set_keras_mask(x, input_mask)
    return standardized_inputs


def _convert_input(layer: keras.Layer, x: Any) -> Any:
    mask = get_keras_mask(x)
    y = layer.dtype_policy.convert_input(x, layer.autocast, layer.input_dtype)
    if mask is not None:
        set_keras_mask(y, mask)
    return y


def pack_outputs(functional: keras.Model, tensors: Sequence[Any]) -> Any:
    """Returns flattened outputs in the structure that a call of the model returns."""
    return unpack_singleton(keras.tree.pack_sequence_as(functional._outputs_struct, list(tensors)))


class Body(keras.Layer):
    """A layer that calls a part of a model's operations in one forward pass, and owns the losses that they add."""

    def __init__(self, name: str, model: keras.Model, layers: Sequence[keras.Layer], run: Callable[..., Any]):
        """Creates the layer; `run` computes the outputs from the arguments of the call and `training`."""
        super().__init__(name=name, dtype=model.dtype_policy)
        self._convert_input_args, self._allow_non_tensor_positional_args = False, True
        self.supports_masking = True
        self.parts = list(layers)
        self._run = run
        self.built = True

    def call(self, *args: Any, training: bool | None = None) -> Any:
        """Runs the operations."""
        return self._run(*args, training=training)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None, because the operations set the masks of their outputs."""


def new_trace() -> tf.Graph:
    """Returns a function graph that only records operations, including those of loops and conditions."""
    return tf.__internal__.FuncGraph("abstract_run")


class UsageScope(RecordedScope):
    """A stateless scope that records which variables are read and assigned; variables need no values.

    `placeholder` returns the value of a variable before assignments; it is called once per variable.
    """

    def __init__(self, placeholder: Callable[[keras.Variable], Any]):
        placeholders: dict[int, Any] = {}

        def read(variable: keras.Variable) -> Any:
            if id(variable) not in placeholders:
                placeholders[id(variable)] = placeholder(variable)
            return placeholders[id(variable)]

        super().__init__([], read=read)
        self.reads: dict[int, keras.Variable] = {}  # by id, in order
        self.assigned: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.reads[id(variable)] = variable
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


def count_operations() -> int:
    """Returns the number of operations in the graph that is being built; 0 in eager mode."""
    return 0 if tf.executing_eagerly() else len(ops.get_default_graph().get_operations())


def find_assigned(operations: int, variables: Sequence[keras.Variable | tf.Variable]) -> list[bool]:
    """Returns, for each variable, whether the latest operations of the graph may assign it; always True in eager mode.

    `operations` is the number of earlier operations, from `count_operations`. The graph must read the variables; for a
    distributed variable, it must read this replica's copy.
    """
    if tf.executing_eagerly():
        return [True] * len(variables)
    graph = ops.get_default_graph()
    assigned_handles: set[int] = set()
    for operation in graph.get_operations()[operations:]:
        _, handles = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        assigned_handles.update(id(handle) for handle in handles)
    return [id(graph.capture(handle)) in assigned_handles for handle in _handles(variables)]


def find_feedback(
    results: Sequence[tf.Tensor], operations: int, variables: Sequence[keras.Variable | tf.Variable]
) -> list[bool]:
    """Returns, for each variable, whether the latest operations may assign it and a later step uses it for the results.

    See `find_assigned`; the result is always False in eager mode.
    """
    if tf.executing_eagerly():
        return [False] * len(variables)
    are_assigned = find_assigned(operations, variables)
    if not any(are_assigned):
        return are_assigned
    graph = ops.get_default_graph()
    names = [graph.capture(handle).name for handle in _handles(variables)]
    needed_names = {tensor.name for tensor in results}
    edges = []
    for operation in reversed(graph.get_operations()[operations:]):
        _, handles = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        edges.append(({x.name for x in (*operation.outputs, *handles)}, [tensor.name for tensor in operation.inputs]))
    previous = None
    while previous != (previous := needed_names.intersection(names)):  # the next step reads these variables
        for outputs, inputs in edges:
            if not needed_names.isdisjoint(outputs):
                needed_names.update(inputs)
    return [is_assigned and name in needed_names for is_assigned, name in zip(are_assigned, names, strict=True)]


def _handles(variables: Sequence[keras.Variable | tf.Variable]) -> list[tf.Tensor]:
    """Returns the resource handles of variables; for distributed variables, of this replica's copies."""
    return [(variable._value if isinstance(variable, keras.Variable) else variable).handle for variable in variables]
