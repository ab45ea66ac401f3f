"""The graph of a functional or sequential model: its calls of operations, and the tensors between them."""

import dataclasses
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.keras_internals import GraphNode


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A symbolic tensor of the model.

    Attributes:
      name: name of the call that returns it, with the index if it returns several; name of the input.
      shape: static shape; None for the number of rows, and for other unknown sizes.
      dtype: element type.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str

    @property
    def is_differentiable(self) -> bool:
        """Whether its elements can have a gradient."""
        dtype = tf.as_dtype(self.dtype)
        return dtype.is_floating or dtype.is_complex


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of an operation. Tensors are indices into `Graph.tensors`.

    Attributes:
      name: name of the operation, below those of the nested models that contain it, such as "encoder/dense"; further
        calls of the same operation have a number, such as "dense (2)".
      operation: the layer or other operation. For the entry of a nested model, the model: such a call only converts the
        model's inputs.
      inputs: tensors among its arguments.
      outputs: tensors that it returns.
    """

    name: str
    operation: keras.Operation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    _node: GraphNode = dataclasses.field(repr=False)
    is_entry: bool = dataclasses.field(repr=False)
    _training: bool | None = dataclasses.field(repr=False)  # of the call of the nested model

    def run(self, values: MutableMapping[int, Any], training: bool | None) -> None:
        """Computes the outputs.

        Args:
          values: tensors by index, to which the outputs are added.
          training: whether this is a training step.
        """
        training = self._training if training is None else training
        given = {id(x): values[number] for x, number in zip(self._node.inputs, self.inputs, strict=True)}
        args, kwargs = self._node.fill_in(given)
        if self.is_entry:
            found = keras_internals.standardized(self.operation, args[0], kwargs.get("mask"))
        else:
            found = keras.tree.flatten(keras_internals.called(self.operation, training)(*args, **kwargs))
        values.update(zip(self.outputs, found, strict=True))

    @property
    def options(self) -> str:
        """Keyword arguments of the call, as a text, without tensors."""
        return repr(
            keras.tree.map_structure(lambda x: "" if isinstance(x, keras.KerasTensor) else x, self._node.kwargs)
        )

    @property
    def layer(self) -> keras.Layer | None:
        """The layer that it runs; None for an operation without state, and for the entry of a nested model."""
        return self.operation if isinstance(self.operation, keras.Layer) and not self.is_entry else None


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The graph of a model; nested functional and sequential models are replaced by their own calls.

    Attributes:
      model: the model.
      functional: the functional model that it runs, which is itself unless it is sequential.
      tensors: all tensors.
      inputs: index of each input's tensor, by the input's name.
      outputs: tensors that the model returns, flattened.
      calls: all calls in the order in which Keras runs them.
      order: indices of the calls in the order in which the model is cut: as in depth-first search from the outputs, with
        the input that takes the longest chain of calls first. A short side branch, such as the projection of a residual,
        is then computed immediately before its use, and an auxiliary output immediately after the layer that it reads.
    """

    model: keras.Model
    functional: keras.Model
    tensors: list[Tensor]
    inputs: dict[str, int]
    outputs: list[int]
    calls: list[Call]
    order: list[int]

    def producers(self) -> dict[int, int]:
        """Returns the call that returns each tensor, which inputs do not have."""
        return {tensor: i for i, call in enumerate(self.calls) for tensor in call.outputs}


class _Builder:
    def __init__(self, model: keras.Model):
        self.policy = model.dtype_policy
        self.tensors: list[Tensor] = []
        self.calls: list[Call] = []
        self.count: dict[tuple[str, int], int] = {}

    def tensor(self, name: str, symbolic: keras.KerasTensor) -> int:
        self.tensors.append(Tensor(name, tuple(symbolic.shape), symbolic.dtype))
        return len(self.tensors) - 1

    def add(self, functional: keras.Model, known: dict[int, int], prefix: str, training: bool | None) -> list[int]:
        """Adds the calls of a model, and returns its outputs.

        Args:
          functional: functional model.
          known: tensors by id of symbolic tensor, with those of the inputs.
          prefix: of names.
          training: argument of the call of the nested model.
        """
        for node in keras_internals.nodes_of(functional):
            inputs = tuple(known[id(x)] for x in node.inputs)
            name = self._name(prefix + node.operation.name, node.operation)
            if self._is_flattened(node):
                outputs = self._add_nested(node, inputs, name, training)
            else:
                outputs = self._numbered(name, node.outputs)
                self.calls.append(Call(name, node.operation, inputs, tuple(outputs), node, False, training))
            known.update(zip(map(id, node.outputs), outputs, strict=True))
        return [known[id(x)] for x in functional.outputs]

    def _add_nested(self, node: GraphNode, inputs: tuple[int, ...], name: str, training: bool | None) -> list[int]:
        nested: Any = node.operation
        inside = keras_internals.functional_of(nested)
        assert inside is not None
        entries = self._numbered(f"{name}/inputs", inside.inputs)
        self.calls.append(Call(f"{name}/inputs", nested, inputs, tuple(entries), node, True, training))
        given = node.kwargs.get("training", training)
        return self.add(inside, dict(zip(map(id, inside.inputs), entries, strict=True)), f"{name}/", given)

    def _is_flattened(self, node: GraphNode) -> bool:
        nested = node.operation
        return (
            isinstance(nested, keras.Model)
            and keras_internals.is_transparent(nested)
            and nested.dtype_policy == self.policy
            and set(node.kwargs) <= {"training", "mask"}
        )

    def _numbered(self, name: str, symbolic: Sequence[keras.KerasTensor]) -> list[int]:
        if len(symbolic) == 1:
            return [self.tensor(name, symbolic[0])]
        return [self.tensor(f"{name}:{i}", x) for i, x in enumerate(symbolic)]

    def _name(self, name: str, operation: keras.Operation) -> str:
        count = self.count[name, id(operation)] = self.count.get((name, id(operation)), 0) + 1
        return f"{name} ({count})" if count > 1 else name


def graph_of(model: keras.Model) -> Graph:
    """Returns the graph of a functional or sequential model; see `check_model`."""
    functional = keras_internals.functional_of(model)
    assert functional is not None
    builder = _Builder(model)
    names = keras_internals.input_names(functional)
    inputs = {name: builder.tensor(name, x) for name, x in zip(names, functional.inputs, strict=True)}
    known = dict(zip(map(id, functional.inputs), inputs.values(), strict=True))
    outputs = builder.add(functional, known, "", None)
    order = list(_depth_first(builder.calls, outputs))
    return Graph(model, functional, builder.tensors, inputs, outputs, builder.calls, order)


def _depth_first(calls: Sequence[Call], outputs: Sequence[int]) -> Iterator[int]:
    """Yields the indices of the calls in the order that `Graph.order` describes."""
    producer = {tensor: i for i, call in enumerate(calls) for tensor in call.outputs}
    heights: list[int] = []  # longest chain of calls up to each, which come in an order of execution
    for call in calls:
        heights.append(1 + max((heights[producer[x]] for x in call.inputs if x in producer), default=0))
    used = {x for call in calls for x in call.inputs}
    ends = [i for i, call in enumerate(calls) if not used.intersection(call.outputs)]
    roots = dict.fromkeys([*(producer[x] for x in outputs if x in producer), *ends])
    done: set[int] = set()
    for root in sorted(roots, key=heights.__getitem__):
        stack = [(root, False)]
        while stack:
            index, is_complete = stack.pop()
            if index in done:
                continue
            if is_complete:
                done.add(index)
                yield index
                continue
            stack.append((index, True))
            before = dict.fromkeys(producer[x] for x in calls[index].inputs if x in producer)
            stack += [(x, False) for x in sorted(before, key=heights.__getitem__)]  # the last is visited first
