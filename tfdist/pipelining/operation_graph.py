"""The graph of a model: its calls of operations, and which variables and memory each uses."""

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
        tensors = {id(x): values[number] for x, number in zip(self._node.inputs, self.inputs, strict=True)}
        args, kwargs = self._node.fill_in(tensors)
        if self.is_entry:
            outputs = keras_internals.standardize_inputs(self.operation, args[0], kwargs.get("mask"))
        else:
            outputs = keras.tree.flatten(keras_internals.operation_function(self.operation, training)(*args, **kwargs))
        values.update(zip(self.outputs, outputs, strict=True))

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
        training_of_nested = node.kwargs.get("training", training)
        return self.add(inside, dict(zip(map(id, inside.inputs), entries, strict=True)), f"{name}/", training_of_nested)

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


_UNKNOWN = 8  # size of any other unknown dim
# Operations whose result is a view of their input, or is not needed by gradients.
_VIEWS = frozenset("Identity Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot".split())


@dataclasses.dataclass(frozen=True)
class Usage:
    """The variables and the memory that one call uses.

    Attributes:
      read: variables that it reads, by id.
      written: variables that it assigns in a training step, by id.
      activations: bytes per row that it keeps for the backward pass: its floating-point results and inner ones, without
        those inside loops, such as the steps of a recurrent layer.
    """

    read: Mapping[int, keras.Variable]
    written: Mapping[int, keras.Variable]
    activations: int

    @property
    def variables(self) -> dict[int, keras.Variable]:
        """Variables that it reads or assigns, by id."""
        return {**self.read, **self.written}


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """The result of an abstract run. Tensors are indices into `Graph.tensors`.

    Attributes:
      usage: for each call of `Graph.calls`.
      masks: for each tensor that has a Keras mask when it is computed, the first tensor with the same mask.
      mask_shapes: shape and dtype of the mask of each such tensor; None for sizes that are unknown.
      masks_seen: for each call, those of its inputs that have a mask at that time. Attention layers remove the masks of
        their inputs, so that calls after them do not see these.
      masks_left: those of the model's outputs that have a mask at the end.
      logits: tensors with attached logits, which Keras's losses use instead of probabilities.
      shapes: shape of each tensor in the abstract run.
      static_shapes: the same, with None for the number of rows, and for other sizes that depend on the batch.
      sizes: bytes per row of each tensor.
      trained: tensors that depend on trainable variables, and can have gradients.
      adds_losses: whether layers add losses, of activations for example.
      sendable: tensors that can be sent to another stage: dense ones of numbers.
    """

    usage: list[Usage]
    masks: dict[int, int]
    mask_shapes: dict[int, tuple[tuple[int | None, ...], str]]
    masks_seen: list[frozenset[int]]
    masks_left: frozenset[int]
    logits: frozenset[int]
    shapes: list[tuple[int, ...]]
    static_shapes: Sequence[tuple[int | None, ...]]
    sizes: list[int]
    trained: frozenset[int]
    adds_losses: bool
    sendable: frozenset[int]


def run_abstractly(graph: Graph, rows: int = 2) -> AbstractRun:
    """Traces a training step's forward pass of a model without computing anything; no variable needs a value.

    Args:
      graph: graph of the model.
      rows: number of rows, unless the model's inputs have a fixed one.
    """
    rows = _fixed_rows(graph) or rows
    tracer = _traced(graph, rows)
    usage = [Usage(*used, size) for used, size in zip(tracer.used, _activations(graph, rows, tracer), strict=True)]
    first: dict[int, int] = {}
    masks = {number: first.setdefault(id(mask), number) for number, mask in sorted(tracer.masks.items())}
    values = [tracer.values[number] for number in range(len(graph.tensors))]
    static = _static_shapes(graph, rows, tracer.shapes())
    return AbstractRun(
        usage=usage,
        masks=masks,
        mask_shapes={number: _mask_shape(static[number], mask) for number, mask in tracer.masks.items()},
        masks_seen=tracer.masks_seen,
        masks_left=tracer.masked(graph.outputs),
        logits=frozenset(number for number, x in enumerate(values) if hasattr(x, "_keras_logits")),
        shapes=tracer.shapes(),
        static_shapes=static,
        sizes=[_bytes(x.dtype, x.shape) // rows for x in values],
        trained=_trained(graph, usage),
        adds_losses=tracer.adds_losses,
        sendable=frozenset(i for i, x in enumerate(values) if isinstance(x, tf.Tensor) and x.dtype != tf.string),
    )


def _fixed_rows(graph: Graph) -> int | None:
    """Returns the number of rows with which the model's inputs were created; None if it is any."""
    sizes = [graph.tensors[number].shape[:1] for number in graph.inputs.values()]
    return next((shape[0] for shape in sizes if shape and shape[0] is not None), None)


def _traced(graph: Graph, rows: int) -> "_Tracer":
    tracer = _Tracer(graph, rows)
    trace = keras_internals.new_trace()
    with trace.as_default():
        layers = dict.fromkeys(call.layer for call in graph.calls if call.layer is not None)
        body = keras_internals.Body("abstract_run", graph.model, list(layers), tracer.run)
        body(tracer.placeholders(), training=True)
    tracer.operations = trace.get_operations()
    return tracer


class _Tracer:
    def __init__(self, graph: Graph, rows: int):
        self._graph, self._rows = graph, rows
        self.values: dict[int, Any] = {}
        self.operations: Sequence[Any] = ()
        self.used: list[tuple[Mapping[int, keras.Variable], Mapping[int, keras.Variable]]] = []
        self.ends: list[int] = []  # number of operations in the trace after each call
        self.masks: dict[int, Any] = {}  # when tensors are computed
        self.masks_seen: list[frozenset[int]] = []
        self.adds_losses = False

    def masked(self, tensors: Sequence[int]) -> frozenset[int]:
        """Returns the tensors, among these, that have a mask now."""
        return frozenset(x for x in tensors if keras_internals.mask_and_logits(self.values[x])[0] is not None)

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the graph's tensors."""
        return [tuple(self.values[number].shape) for number in range(len(self._graph.tensors))]

    def placeholders(self) -> list[tf.Tensor]:
        """Returns an abstract batch."""
        inputs = [self._graph.tensors[number] for number in self._graph.inputs.values()]
        sizes = [
            [(_UNKNOWN if i else self._rows) if size is None else size for i, size in enumerate(x.shape)]
            for x in inputs
        ]
        return [tf.compat.v1.placeholder(x.dtype, shape) for x, shape in zip(inputs, sizes, strict=True)]

    def run(self, inputs: Sequence[tf.Tensor], training: bool) -> None:
        """Runs the calls, and records the variables that each uses."""
        self.values.update(zip(self._graph.inputs.values(), inputs, strict=True))
        trace = tf.compat.v1.get_default_graph()

        def stand_in(variable: keras.Variable) -> tf.Tensor:
            with trace.as_default():  # the first read may be in a branch, whose tensors no other branch may use
                return tf.compat.v1.placeholder(variable.dtype, variable.shape)

        scope = keras_internals.UsageScope(stand_in)
        with scope:
            for call in self._graph.calls:
                scope.read, scope.written = {}, {}
                self.masks_seen.append(self.masked(call.inputs))
                call.run(self.values, training)
                for tensor in self.masked(call.outputs):
                    self.masks[tensor], _ = keras_internals.mask_and_logits(self.values[tensor])
                self.used.append((scope.read, scope.written))
                self.ends.append(trace.version)
        self.adds_losses = bool(scope.losses)


def _activations(graph: Graph, rows: int, tracer: _Tracer) -> list[int]:
    """Returns the bytes per row that each call keeps."""
    active = {tracer.values[number].name for number in graph.inputs.values()}
    sizes, start = [], 0
    for call, end in zip(graph.calls, tracer.ends, strict=True):
        size = 0
        for operation in tracer.operations[start:end]:
            if any(x.name in active for x in operation.inputs):
                active.update(x.name for x in operation.outputs)
                if operation.type not in _VIEWS:
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

    Inside nested models, Keras does not know all others: those that are the same for another number of rows. A number of
    rows with which inputs were created does not bind a call in Keras, and is not that of a micro-batch.
    """
    static_shapes = [tensor.shape for tensor in graph.tensors]
    is_open = any(None in static_shapes[number][1:] for number in graph.inputs.values())
    if not is_open and any(None in shape[1:] for shape in static_shapes):
        others = _traced(graph, rows + 1).shapes()
        static_shapes = [
            tuple(x if x == y else None for x, y in zip(shape, other, strict=True))
            for shape, other in zip(shapes, others, strict=True)
        ]
    fixed = _fixed_rows(graph)
    return (
        static_shapes
        if fixed is None
        else [(None, *shape[1:]) if shape[:1] == (fixed,) else shape for shape in static_shapes]
    )


def _mask_shape(shape: Sequence[int | None], mask: tf.Tensor) -> tuple[tuple[int | None, ...], str]:
    """Returns the shape and dtype of a mask, whose sizes are unknown where those of its tensor are."""
    sizes = [None if shape[dim : dim + 1] == (None,) else size for dim, size in enumerate(mask.shape)]
    return tuple(sizes), mask.dtype.name


def _trained(graph: Graph, usage: Sequence[Usage]) -> frozenset[int]:
    trained: set[int] = set()
    for call, used in zip(graph.calls, usage, strict=True):
        is_trained = any(variable.trainable for variable in used.read.values()) or trained.intersection(call.inputs)
        if is_trained:
            dtypes = {x: tf.as_dtype(graph.tensors[x].dtype) for x in call.outputs}
            trained.update(x for x, dtype in dtypes.items() if dtype.is_floating or dtype.is_complex)
    return frozenset(trained)
