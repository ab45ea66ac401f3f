"""Internals of functional and sequential models: their graph of operations, and what a traced graph assigns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.models.functional import Functional, operation_fn, unpack_singleton
from tensorflow.python.framework import auto_control_deps_utils, ops

from tfdist.keras_internals.variables import RecordedScope

_CALLS = (Functional.call, keras.Sequential.call)


class GraphNode(NamedTuple):
    """One call of an operation in a functional model.

    Attributes:
      operation: the layer or other operation; a layer that is called twice has two nodes.
      inputs: symbolic tensors among the arguments.
      outputs: symbolic tensors that it returns, flattened.
      kwargs: keyword arguments, with symbolic tensors.
      fill_in: returns the positional and keyword arguments, given tensors by the id of the symbolic tensor.
    """

    operation: keras.Operation
    inputs: Sequence[keras.KerasTensor]
    outputs: Sequence[keras.KerasTensor]
    kwargs: Mapping[str, Any]
    fill_in: Callable[[Mapping[int, Any]], tuple[Sequence[Any], dict[str, Any]]]


def functional_of(model: Any) -> keras.Model | None:
    """Returns the functional model that a call of a model runs; None if there is none.

    A functional model runs itself. A sequential model has one as soon as it has an input shape. Subclasses that override
    `call` have none.
    """
    if getattr(type(model), "call", None) not in _CALLS or "call" in vars(model):
        return None
    return model._functional if isinstance(model, keras.Sequential) else model


def input_names(functional: keras.Model) -> list[str]:
    """Returns the names of the inputs of a functional model."""
    return [x._keras_history.operation.name for x in functional.inputs]


def is_transparent(model: keras.Model) -> bool:
    """Returns whether a call of a nested model does nothing that its operations do not do when called one by one."""
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
    """Yields the calls of a functional model, except of its input layers, in the order in which Keras runs them."""
    by_depth = functional._nodes_by_depth
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.operation and not node.is_input:
                arguments = node.arguments
                yield GraphNode(node.operation, node.input_tensors, node.outputs, arguments.kwargs, arguments.fill_in)


def operation_function(operation: keras.Operation, training: bool | None) -> Callable[..., Any]:
    """Returns a function that calls an operation as a functional model calls its own."""
    return operation_fn(operation, training=training)


def standardize_inputs(model: keras.Model, inputs: Any, mask: Any = None) -> list[Any]:
    """Returns the inputs of a functional or sequential model, flattened, as its first layers get them.

    Args:
      model: the model.
      inputs: structure of tensors that a call of the model accepts.
      mask: its argument `mask`; None for the masks that the inputs have.

    Returns:
      Tensors with the dtypes and ranks of the model's inputs, and masks.
    """
    masks = keras.tree.flatten(mask)
    if all(x is None for x in masks):
        masks = [get_keras_mask(x) for x in keras.tree.flatten(inputs)]
    if model._convert_input_args:
        inputs = keras.tree.map_structure(lambda x: _converted(model, x), inputs)
    functional = functional_of(model)
    assert functional is not None
    standardized_inputs = functional._standardize_inputs(inputs)
    for x, own_mask in zip(standardized_inputs, masks, strict=False):
        if own_mask is not None:
            set_keras_mask(x, own_mask)
    return standardized_inputs


def _converted(layer: keras.Layer, x: Any) -> Any:
    mask = get_keras_mask(x)
    y = layer.dtype_policy.convert_input(x, layer.autocast, layer.input_dtype)
    if mask is not None:
        set_keras_mask(y, mask)
    return y


def pack_outputs(functional: keras.Model, tensors: Sequence[Any]) -> Any:
    """Returns flattened outputs in the structure that a call of the model returns."""
    return unpack_singleton(keras.tree.pack_sequence_as(functional._outputs_struct, list(tensors)))


class Body(keras.Layer):
    """A part of a model as a layer: calls its operations as one forward pass, which owns the losses that they add."""

    def __init__(self, name: str, model: keras.Model, layers: Sequence[keras.Layer], run: Callable[..., Any]):
        """Creates the layer.

        Args:
          name: name of the layer.
          model: the model, whose dtype policy applies.
          layers: layers that are called.
          run: called with the arguments of a call and `training`; its results are returned.
        """
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
        """Returns None: the operations have set the masks of their outputs."""


def new_trace() -> tf.Graph:
    """Returns a graph in which operations are only recorded, as those of a function: loops and conditions are its own."""
    return tf.__internal__.FuncGraph("abstract_run")


class UsageScope(RecordedScope):
    """A stateless scope that records which variables are read and assigned; they need no values.

    Attributes:
      read: variables that were read, by id, in order.
      written: variables that were assigned, by id, in order.
    """

    def __init__(self, placeholder: Callable[[keras.Variable], Any]):
        """Initializes the scope.

        Args:
          placeholder: returns the tensor that a variable is until it is assigned; called once for each.
        """
        super().__init__([], read=self._first_read)
        self._placeholder = placeholder
        self._placeholders: dict[int, Any] = {}
        self.read: dict[int, keras.Variable] = {}
        self.written: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See base class."""
        self.read[id(variable)] = variable
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """See base class."""
        self.written[id(update[0])] = update[0]
        super().add_update(update)

    def _first_read(self, variable: keras.Variable) -> Any:
        if id(variable) not in self._placeholders:
            self._placeholders[id(variable)] = self._placeholder(variable)
        return self._placeholders[id(variable)]


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
    previous = None
    while previous != (previous := needed.intersection(names)):  # the next step needs the values of these variables
        for outputs, inputs in steps:
            if not needed.isdisjoint(outputs):
                needed.update(inputs)
    return [is_assigned and name in needed for is_assigned, name in zip(assigned, names, strict=True)]


def _handles(variables: Sequence[keras.Variable | tf.Variable]) -> list[tf.Tensor]:
    """Returns the resources of variables; of distributed ones, of this replica's copies."""
    return [(variable._value if isinstance(variable, keras.Variable) else variable).handle for variable in variables]
