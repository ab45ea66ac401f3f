"""The graph of a model: its calls of operations, and the variables and memory that each call uses."""

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.keras_internals import GraphNode


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A symbolic tensor of the model."""

    name: str  # of the input, or of the call that returns it, with an index if the call returns several tensors
    shape: tuple[int | None, ...]  # static shape; None for the number of rows and for other unknown sizes
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of an operation. Tensors are indices into `Graph.tensors`."""

    # The name of the operation, with the nested models that contain it as a prefix, such as "encoder/dense"; the second call of
    # an operation is named "dense (2)".
    name: str
    operation: keras.Operation  # the nested model, for the call that converts its inputs (its entry)
    inputs: tuple[int, ...]  # tensors among its arguments
    outputs: tuple[int, ...]
    _node: GraphNode = dataclasses.field(repr=False)
    is_entry: bool = dataclasses.field(repr=False)
    _training: bool | None = dataclasses.field(repr=False)  # of the call of the nested model

    def run(self, values: MutableMapping[int, Any], training: bool | None) -> None:
        """Computes the outputs and adds them to `values`, which are tensors by index."""
        training = self._training if training is None else training
        tensors = {id(x): values[index] for x, index in zip(self._node.inputs, self.inputs, strict=True)}
        args, kwargs = self._node.fill_in(tensors)
        if self.is_entry:
            outputs = keras_internals.standardize_inputs(self.operation, args[0], kwargs.get("mask"))
        else:
            function = keras_internals.operation_function(self.operation, training=training)
            outputs = keras.tree.flatten(function(*args, **kwargs))
        values.update(zip(self.outputs, outputs, strict=True))

    @property
    def options(self) -> Any:
        """Keyword arguments of the call, without tensors."""
        return keras.tree.map_structure(lambda x: "" if isinstance(x, keras.KerasTensor) else x, self._node.kwargs)

    @property
    def layer(self) -> keras.Layer | None:
        """The layer that the call runs; None for a stateless operation, and for the entry of a nested model."""
        return self.operation if isinstance(self.operation, keras.Layer) and not self.is_entry else None


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The graph of a model; nested functional and sequential models are replaced by their own calls."""

    model: keras.Model
    functional: keras.Model  # the functional model inside `model`; the model itself unless it is sequential
    tensors: list[Tensor]
    inputs: dict[str, int]  # index of the tensor of each input, by name
    outputs: list[int]  # tensors that the model returns, flattened
    calls: list[Call]  # in the order in which Keras runs them
    # Indices of the calls in the order in which the model is cut: a depth-first search from the outputs, with the longest
    # branch first. So a short side branch, such as the projection of a residual, is computed immediately before its use, and
    # an auxiliary output immediately after its input.
    order: list[int]


class _Builder:
    def __init__(self, model: keras.Model):
        self.policy = model.dtype_policy
        self.tensors: list[Tensor] = []
        self.calls: list[Call] = []
        self.count: dict[tuple[str, int], int] = {}

    def tensor(self, name: str, symbolic: keras.KerasTensor) -> int:
        self.tensors.append(Tensor(name, tuple(symbolic.shape), symbolic.dtype))
        return len(self.tensors) - 1

    def add(self, functional: keras.Model, indices: dict[int, int], prefix: str, training: bool | None) -> list[int]:
        """Adds the calls of a model and returns its outputs; `indices` maps ids of symbolic tensors to tensors."""
        for node in keras_internals.nodes_of(functional):
            inputs = tuple(indices[id(x)] for x in node.inputs)
            name = self._name(prefix + node.operation.name, node.operation)
            nested = keras_internals.functional_of(node.operation) if self._is_inlined(node) else None
            call_name, symbolic = (f"{name}/inputs", nested.inputs) if nested else (name, node.outputs)
            outputs = self._add_tensors(call_name, symbolic)
            is_entry = nested is not None
            self.calls.append(Call(call_name, node.operation, inputs, tuple(outputs), node, is_entry, training))
            if nested:
                entries = dict(zip(map(id, nested.inputs), outputs, strict=True))
                outputs = self.add(nested, entries, f"{name}/", node.kwargs.get("training", training))
            indices.update(zip(map(id, node.outputs), outputs, strict=True))
        return [indices[id(x)] for x in functional.outputs]

    def _is_inlined(self, node: GraphNode) -> bool:
        nested = node.operation
        return (
            isinstance(nested, keras.Model)
            and keras_internals.is_transparent(nested)
            and nested.dtype_policy == self.policy
            and set(node.kwargs) <= {"training", "mask"}
        )

    def _add_tensors(self, name: str, symbolic: Sequence[keras.KerasTensor]) -> list[int]:
        if len(symbolic) == 1:
            return [self.tensor(name, symbolic[0])]
        return [self.tensor(f"{name}:{i}", x) for i, x in enumerate(symbolic)]

    def _name(self, name: str, operation: keras.Operation) -> str:
        call_count = self.count[name, id(operation)] = self.count.get((name, id(operation)), 0) + 1
        return f"{name} ({call_count})" if call_count > 1 else name


def graph_of(model: keras.Model) -> Graph:
    """Returns the graph of a functional or sequential model; see `check_model`."""
    functional = keras_internals.functional_of(model)
    assert functional is not None
    builder = _Builder(model)
    names = keras_internals.input_names(functional)
    inputs = {name: builder.tensor(name, x) for name, x in zip(names, functional.inputs, strict=True)}
    indices = dict(zip(map(id, functional.inputs), inputs.values(), strict=True))
    outputs = builder.add(functional, indices, "", None)
    order = list(_depth_first(builder.calls, outputs))
    return Graph(model, functional, builder.tensors, inputs, outputs, builder.calls, order)


def _depth_first(calls: Sequence[Call], outputs: Sequence[int]) -> Iterator[int]:
    """Yields the indices of the calls in the order that `Graph.order` describes."""
    producer = {tensor: i for i, call in enumerate(calls) for tensor in call.outputs}
    heights: list[int] = []  # length of the longest chain of calls up to each call
    for call in calls:
        heights.append(1 + max((heights[producer[x]] for x in call.inputs if x in producer), default=0))
    inputs = {x for call in calls for x in call.inputs}
    ends = [i for i, call in enumerate(calls) if not inputs.intersection(call.outputs)]
    roots = dict.fromkeys([*(producer[x] for x in outputs if x in producer), *ends])
    visited: set[int] = set()
    for root in sorted(roots, key=heights.__getitem__):
        stack = [(root, False)]
        while stack:
            index, is_complete = stack.pop()
            if index in visited:
                continue
            if is_complete:
                visited.add(index)
                yield index
                continue
            stack.append((index, True))
            predecessors = dict.fromkeys(producer[x] for x in calls[index].inputs if x in producer)
            stack += [(x, False) for x in sorted(predecessors, key=heights.__getitem__)]  # the last is visited first


_UNKNOWN_SIZE = 8  # size that replaces unknown dims, other than the batch dim, in an abstract run
# Operations whose result is a view of their input, or is not needed for gradients.
_UNSTORED_TYPES = frozenset("Identity Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot".split())


@dataclasses.dataclass(frozen=True)
class Usage:
    """The variables and memory that one call uses."""

    reads: Mapping[int, keras.Variable]  # by id
    assigned: Mapping[int, keras.Variable]  # in a training step, by id
    # Bytes per row that the call keeps for the backward pass: floating-point results, including inner ones, but not those
    # inside loops, such as the steps of a recurrent layer.
    activations: int

    @property
    def variables(self) -> dict[int, keras.Variable]:
        """Variables that the call reads or assigns, by id."""
        return {**self.reads, **self.assigned}


class AbstractRun:
    """The forward pass of a training step, traced without computing anything; variables need no values.

    Tensors are indices into `Graph.tensors`.
    """

    def __init__(self, graph: Graph, rows: int = 2):
        """Traces the forward pass; if the model's inputs have a fixed number of rows, it replaces `rows`."""
        self.graph = graph
        rows = _fixed_rows(graph) or rows
        tracer = _Tracer(graph, rows)
        values = [tracer.values[index] for index in range(len(graph.tensors))]
        sizes = _activations(graph, rows, tracer)
        # For each call of `Graph.calls`.
        self.usage = [Usage(*use, size) for use, size in zip(tracer.usages, sizes, strict=True)]
        first_tensors: dict[int, int] = {}
        # For each tensor that is computed with a Keras mask, the first tensor with the same mask.
        self.masks = {i: first_tensors.setdefault(id(mask), i) for i, mask in sorted(tracer.masks.items())}
        self.shapes = tracer.shapes()  # of each tensor in the abstract run
        self.static_shapes = _static_shapes(graph, rows, self.shapes)  # with None for sizes that depend on the batch
        # Shapes and dtypes of the masks; None for unknown sizes.
        self.mask_shapes = {i: _mask_shape(self.static_shapes[i], mask) for i, mask in tracer.masks.items()}
        # For each call, its inputs that have a mask when it runs; attention layers remove the masks of their inputs.
        self.masked_call_inputs = tracer.masked_call_inputs
        self.masked_outputs = tracer.masked_tensors(graph.outputs)  # outputs of the model that have a mask in the end
        # Tensors with attached logits, which Keras's losses use instead of probabilities.
        self.logits = {i for i, x in enumerate(values) if hasattr(x, "_keras_logits")}
        self.sizes = [_bytes(x.dtype, x.shape) // rows for x in values]  # bytes per row of each tensor
        # Tensors that depend on trainable variables and can have gradients.
        self.differentiable = _differentiable_tensors(graph, self.usage)
        self.adds_losses = tracer.adds_losses  # whether layers add losses, such as activity regularization
        # Tensors that can be sent to another stage: dense tensors of numbers.
        self.sendable_tensors = {i for i, x in enumerate(values) if isinstance(x, tf.Tensor) and x.dtype != tf.string}


def _fixed_rows(graph: Graph) -> int | None:
    sizes = [graph.tensors[index].shape[:1] for index in graph.inputs.values()]
    return next((shape[0] for shape in sizes if shape and shape[0] is not None), None)


class _Tracer:
    def __init__(self, graph: Graph, rows: int):
        self._graph, self._rows = graph, rows
        self.values: dict[int, Any] = {}
        self.usages: list[tuple[Mapping[int, keras.Variable], Mapping[int, keras.Variable]]] = []
        self.ends: list[int] = []  # number of operations in the trace after each call
        self.masks: dict[int, Any] = {}  # of each tensor when it is computed
        self.masked_call_inputs: list[frozenset[int]] = []
        trace = keras_internals.new_trace()
        with trace.as_default():
            layers = dict.fromkeys(call.layer for call in graph.calls if call.layer is not None)
            body = keras_internals.Body("abstract_run", graph.model, list(layers), self._run)
            inputs = [graph.tensors[index] for index in graph.inputs.values()]
            sizes = [
                [(_UNKNOWN_SIZE if i else rows) if n is None else n for i, n in enumerate(x.shape)] for x in inputs
            ]
            placeholders = [tf.compat.v1.placeholder(x.dtype, n) for x, n in zip(inputs, sizes, strict=True)]
            body(placeholders, training=True)
        self.operations: Sequence[Any] = trace.get_operations()

    def masked_tensors(self, tensors: Sequence[int]) -> frozenset[int]:
        """Returns the subset of the tensors that currently have a mask."""
        return frozenset(x for x in tensors if keras_internals.mask_and_logits(self.values[x])[0] is not None)

    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self.values[index].shape) for index in range(len(self._graph.tensors))]

    def _run(self, inputs: Sequence[tf.Tensor], training: bool) -> None:
        self.values.update(zip(self._graph.inputs.values(), inputs, strict=True))
        trace = tf.compat.v1.get_default_graph()

        def make_placeholder(variable: keras.Variable) -> tf.Tensor:
            with trace.as_default():  # other branches cannot use a tensor of the branch of the first read
                return tf.compat.v1.placeholder(variable.dtype, variable.shape)

        scope = keras_internals.UsageScope(make_placeholder)
        with scope:
            for call in self._graph.calls:
                scope.reads, scope.assigned = {}, {}
                self.masked_call_inputs.append(self.masked_tensors(call.inputs))
                call.run(self.values, training)
                for tensor in self.masked_tensors(call.outputs):
                    self.masks[tensor], _ = keras_internals.mask_and_logits(self.values[tensor])
                self.usages.append((scope.reads, scope.assigned))
                self.ends.append(trace.version)
        self.adds_losses = bool(scope.losses)


def _activations(graph: Graph, rows: int, tracer: _Tracer) -> list[int]:
    active = {tracer.values[index].name for index in graph.inputs.values()}
    sizes, start = [], 0
    for call, end in zip(graph.calls, tracer.ends, strict=True):
        size = 0
        for operation in tracer.operations[start:end]:
            if any(x.name in active for x in operation.inputs):
                active.update(x.name for x in operation.outputs)
                if operation.type not in _UNSTORED_TYPES:
                    size += sum(_bytes(x.dtype, x.shape) for x in operation.outputs if x.dtype.is_floating)
        if keras_internals.is_rematerialized(call.operation):
            size = sum(_bytes(x.dtype, x.shape) for x in map(tracer.values.__getitem__, call.outputs))
        sizes.append(size // rows)
        start = end
    return sizes


def _bytes(dtype: Any, shape: tf.TensorShape) -> int:
    return (shape.num_elements() or 0) * tf.as_dtype(dtype).size


def _static_shapes(graph: Graph, rows: int, shapes: Sequence[tuple[int, ...]]) -> Sequence[tuple[int | None, ...]]:
    """Returns the shapes with None for sizes that depend on the batch.

    Keras does not know all static sizes inside nested models: a size is static if it is equal for another number of rows. A
    fixed number of rows in the model's inputs becomes None, because micro-batches have a different number.
    """
    static_shapes = [tensor.shape for tensor in graph.tensors]
    is_open = any(None in static_shapes[index][1:] for index in graph.inputs.values())
    if not is_open and any(None in shape[1:] for shape in static_shapes):
        other_shapes = _Tracer(graph, rows + 1).shapes()
        static_shapes = [
            tuple(x if x == y else None for x, y in zip(shape, other, strict=True))
            for shape, other in zip(shapes, other_shapes, strict=True)
        ]
    fixed = _fixed_rows(graph)
    return [(None, *shape[1:]) if fixed and shape[:1] == (fixed,) else shape for shape in static_shapes]


def _mask_shape(shape: Sequence[int | None], mask: tf.Tensor) -> tuple[tuple[int | None, ...], str]:
    """Returns the shape and dtype of a mask; sizes that are unknown in its tensor are None."""
    sizes = [None if shape[dim : dim + 1] == (None,) else size for dim, size in enumerate(mask.shape)]
    return tuple(sizes), mask.dtype.name


def _differentiable_tensors(graph: Graph, usage: Sequence[Usage]) -> frozenset[int]:
    tensors: set[int] = set()
    for call, use in zip(graph.calls, usage, strict=True):
        if any(variable.trainable for variable in use.reads.values()) or tensors.intersection(call.inputs):
            dtypes = {x: tf.as_dtype(graph.tensors[x].dtype) for x in call.outputs}
            tensors.update(x for x, dtype in dtypes.items() if dtype.is_floating or dtype.is_complex)
    return frozenset(tensors)
