"""The forward and backward pass of a stage as functions that are traced once and called for each micro-batch.

The backward pass is traced inside the forward pass. Tensors of the forward pass that it needs, the residuals, become results
of the forward function and arguments of the backward function, so the two may be called in different functions, in different
steps, or eagerly.

The backward pass may be split into two parts: the first computes the gradients of the inputs, the second those of the
variables, and no operation is computed twice. Qi et al., Zero Bubble Pipeline Parallelism, 2024 (arXiv:2401.10241).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from tfdist import keras_internals
from tfdist.pipelining.stage_costs import CrossingSpec, with_static_shapes

Operations = frozenset[tf.Operation]
_READ_TYPES = ("ReadVariableOp", "ResourceGather", "VariableShape")  # stateful, but their only effect is their result


def required_operations(targets: Iterable[tf.Tensor | tf.Operation]) -> Operations:
    """Returns the operations that compute the targets, and all operations on which they depend, including control inputs."""
    pending = [target.op if isinstance(target, tf.Tensor) else target for target in targets]
    operations: set[tf.Operation] = set()
    while pending:
        operation = pending.pop()
        if operation not in operations:
            operations.add(operation)
            pending += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return frozenset(operations)


def stateful_operations(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of a function's graph that run even if nothing needs their results."""
    return [operation for operation in graph.control_outputs if operation.type not in _READ_TYPES]


def inputs_of(operations: Operations, outputs: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors of other operations that these operations use, or that are among the outputs."""
    operands = [tensor for operation in operations for tensor in operation.inputs]
    tensors_by_name = {tensor.name: tensor for tensor in [*operands, *outputs] if tensor.op not in operations}
    return [tensors_by_name[name] for name in sorted(tensors_by_name)]


def extract_function(
    graph: tf.Graph,
    operations: Operations,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    values: Mapping[str, Any],
) -> tf.types.experimental.ConcreteFunction:
    """Extracts operations of a graph as a function.

    Args:
      graph: the graph, which must live as long as the function.
      operations: operations of the function.
      inputs: tensors of other operations, which become arguments.
      outputs: results of the operations, or inputs.
      values: other tensors that the operations use, by name in the graph, which the function captures: handles of variables.
    """
    definition = _graph_definition(graph, operations)
    effects = [operation.name for operation in stateful_operations(graph) if operation in operations]
    computed_outputs = [tensor for tensor in outputs if tensor.op in operations]

    def part(*arguments: tf.Tensor) -> list[tf.Tensor]:
        operand_names = {tensor.name for operation in operations for tensor in operation.inputs}
        capture = tf.compat.v1.get_default_graph().capture
        tensors = {name: capture(value) for name, value in values.items() if name in operand_names}
        tensors |= {tensor.name: argument for tensor, argument in zip(inputs, arguments, strict=True)}
        keras_internals.add_functions(graph)
        results = tf.graph_util.import_graph_def(
            definition,
            {name: tensor for name, tensor in tensors.items() if name in operand_names},
            [*(tensor.name for tensor in computed_outputs), *effects],
            name="part",
        )
        with tf.control_dependencies(results[len(computed_outputs) :]):
            tf.compat.v1.get_default_graph().control_outputs.append(tf.no_op())
        for tensor, value in zip(computed_outputs, results[: len(computed_outputs)], strict=True):
            value.set_shape(tensor.shape)
            tensors[tensor.name] = value
        return [tf.identity(tensors[tensor.name]) for tensor in outputs]

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    return tf.function(part, autograph=False).get_concrete_function(*specs)


def _graph_definition(graph: tf.Graph, operations: Operations) -> tf.compat.v1.GraphDef:
    """Returns the definition of operations without colocation constraints or control inputs from other operations."""
    definition, names = graph.as_graph_def(), {operation.name for operation in operations}
    part = tf.compat.v1.GraphDef(versions=definition.versions)
    for node in definition.node:
        if node.name in names:
            inputs = [name for name in node.input if not name.startswith("^") or name[1:] in names]
            node.attr.pop("_class", None)
            copy = part.node.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(inputs)
    return part


Gradient: TypeAlias = tf.Tensor | None  # None if the loss does not depend on the variable


class Forward(NamedTuple):
    """The result of the forward pass of a stage for one micro-batch, during tracing."""

    sent: Sequence[tf.Tensor]  # tensors for the next stage
    loss: tf.Tensor  # scalar to differentiate: the loss in the last stage; in others, losses of the stage's layers
    share: tf.Tensor  # scalar; contribution of the micro-batch to the reported loss


class Stage(Protocol):
    """A stage of a model, for tracing."""

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Values of the trainable variables of the stage."""

    @property
    def received(self) -> Sequence[CrossingSpec]:
        """The tensors from the previous stage."""

    @property
    def sent(self) -> Sequence[CrossingSpec]:
        """The tensors for the next stage."""

    def forward(self, arguments: Any, received: Sequence[tf.Tensor]) -> Forward:
        """Computes the forward pass of a micro-batch inside a gradient tape, from arguments and variables only."""

    def gradients(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> Sequence[Gradient]:
        """Converts the gradients of the variables to the form in which they are summed over micro-batches."""


class ForwardResult(NamedTuple):
    """The result of a forward pass."""

    sent: list[tf.Tensor]  # tensors for the next stage
    share: tf.Tensor  # scalar; contribution of the micro-batch to the reported loss
    residuals: list[tf.Tensor]  # inputs of the backward pass, including the values of variables that were read


class Passes:
    """The passes of a stage. They can be called eagerly, or any number of times in a function.

    Every call of the forward pass has its side effects, such as updates of metrics.
    """

    # For each received tensor with a gradient, whether the results depend on it; otherwise its gradient is zero.
    uses: list[bool]

    def __init__(self, stage: Stage, arguments: Any, split: bool = False):
        """Traces the passes; the backward pass in two parts if `split`.

        `arguments` is the structure of the arguments of `stage.forward`. The values of tensors may change from call to call;
        other leaves are constant.
        """
        self._stage, self._split = stage, split
        self._leaves = tf.nest.flatten(arguments, expand_composites=True)
        self._structure = arguments
        specs = [*self._tensors(arguments), *(crossing.spec for crossing in stage.received)]
        forward_function = tf.function(self._trace, autograph=False)
        self._forward = forward_function.get_concrete_function(*(tf.TensorSpec(x.shape, x.dtype) for x in specs))
        self._extract()

    def forward(self, arguments: Any, received: Sequence[tf.Tensor]) -> ForwardResult:
        """Computes the forward pass of a micro-batch."""
        results = self._forward(*self._tensors(arguments), *received)
        count = len(self._stage.sent)
        return ForwardResult(results[:count], results[count], results[count + 1 :])

    def backward(
        self, residuals: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]
    ) -> tuple[list[Gradient], list[tf.Tensor]]:
        """Computes the backward pass from residuals, and from gradients of the sent tensors that have one.

        Returns the gradients of the variables, in order, and the gradients of the received tensors that have one.
        """
        results = self._backward(*residuals, *gradients)
        count = len(results) - len(self._input_gradients)
        return self._insert_none(results[:count]), results[count:]

    def backward_input(
        self, residuals: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the gradients for the previous stage, which waits for them, and the arguments of `backward_weight`."""
        arguments = [*residuals, *gradients]
        results = self._backward_input(*(arguments[i] for i in self._input_arguments))
        count = len(self._input_gradients)
        return results[:count], [*results[count:], *(arguments[i] for i in self._weight_arguments)]

    def backward_weight(self, residuals: Sequence[tf.Tensor]) -> list[Gradient]:
        """Computes the second part of the backward pass, the gradients of the variables."""
        return self._insert_none(self._backward_weight(*residuals))

    def _trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Returns the results of the forward pass, and traces the backward pass."""
        stage = self._stage
        count = len(tensors) - len(stage.received)
        with tf.GradientTape() as tape:
            inputs = [tf.identity(tensor) for tensor in tensors[count:]]
            tape.watch(with_gradients(inputs, stage.received))
            sent, loss, share = stage.forward(self._pack_arguments(tensors[:count]), inputs)
            sent = with_static_shapes(sent, stage.sent)
            sent = [tf.identity(tensor) for tensor in sent]  # a tensor may be both a target and a source
        sources = [*stage.variables, *with_gradients(inputs, stage.received)]
        targets = [*with_gradients(sent, stage.sent), loss]

        def backward(*gradients: tf.Tensor) -> tuple[list[Gradient], list[tf.Tensor]]:
            results = tape.gradient(targets, sources, output_gradients=[*gradients, tf.ones_like(loss)])
            local_gradients, input_gradients = results[: len(stage.variables)], results[len(stage.variables) :]
            self.uses = [gradient is not None for gradient in input_gradients]
            crossings = with_gradients(stage.received, stage.received)
            filled_gradients = [
                tf.zeros(crossing.spec.shape, crossing.spec.dtype) if g is None else tf.convert_to_tensor(g)
                for g, crossing in zip(input_gradients, crossings, strict=True)
            ]
            return list(stage.gradients(local_gradients)), with_static_shapes(filled_gradients, crossings)

        specs = [crossing.spec for crossing in with_gradients(stage.sent, stage.sent)]
        self._backward_trace, sources, captures = keras_internals.trace_inside(backward, specs)
        return [*sent, share, *self._find_residuals(sources, captures)]

    def _find_residuals(self, sources: Sequence[Any], captures: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the captures, tensors of the forward pass, that the backward pass needs; see `trace_inside`."""
        graph = self._backward_trace.graph
        variable_gradients, self._input_gradients = self._backward_trace.structured_outputs
        self._has_gradient = [gradient is not None for gradient in variable_gradients]
        self._variable_gradients = [_source_tensor(gradient) for gradient in variable_gradients if gradient is not None]
        self._input_gradients = [_source_tensor(gradient) for gradient in self._input_gradients]
        effects = stateful_operations(graph)
        self._operations = required_operations([*self._variable_gradients, *self._input_gradients, *effects])
        inner = [placeholder for _, placeholder in graph.captures]
        self._values = {x.name: source for x, source in zip(inner, sources, strict=True) if source is not None}
        candidates = [x for x, source in zip(inner, sources, strict=True) if source is None]
        pairs = [(x, outer) for x, outer in zip(candidates, captures, strict=True) if x.op in self._operations]
        self._arguments = [x for x, _ in pairs] + graph.inputs[: len(graph.inputs) - len(inner)]
        return [outer for _, outer in pairs]

    def _extract(self) -> None:
        graph = self._backward_trace.graph
        placeholders = frozenset(tensor.op for tensor in graph.inputs)
        results = [*self._variable_gradients, *self._input_gradients]
        operations = self._operations - placeholders
        if not self._split:
            self._backward = extract_function(graph, operations, self._arguments, results, self._values)
            return
        input_ops = required_operations(self._input_gradients) - placeholders
        weight_ops = operations - input_ops
        weight_ops |= {x for x in required_operations(weight_ops) if x.type == "Const"}  # both parts may have a copy
        boundary = [x for x in inputs_of(weight_ops, self._variable_gradients) if x.name not in self._values]
        intermediates = [x for x in boundary if x.op not in placeholders]
        weight_arguments = [x for x in boundary if x.op in placeholders]
        indices = {tensor.name: i for i, tensor in enumerate(self._arguments)}
        input_arguments = [x for x in inputs_of(input_ops, self._input_gradients) if x.name not in self._values]
        self._input_arguments = [indices[tensor.name] for tensor in input_arguments]
        self._weight_arguments = [indices[tensor.name] for tensor in weight_arguments]
        results, arguments = [*self._input_gradients, *intermediates], [*intermediates, *weight_arguments]
        self._backward_input = extract_function(graph, input_ops, input_arguments, results, self._values)
        self._backward_weight = extract_function(graph, weight_ops, arguments, self._variable_gradients, self._values)

    def _tensors(self, arguments: Any) -> list[tf.Tensor]:
        leaves = tf.nest.flatten(arguments, expand_composites=True)
        return [leaf for leaf, example in zip(leaves, self._leaves, strict=True) if _is_tensor(example)]

    def _pack_arguments(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns arguments with these tensors and with the constant leaves."""
        values = iter(tensors)
        leaves = [next(values) if _is_tensor(leaf) else leaf for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)

    def _insert_none(self, gradients: Sequence[tf.Tensor]) -> list[Gradient]:
        """Returns the gradient of each variable, with None for variables without one."""
        values = iter(gradients)
        return [next(values) if has_gradient else None for has_gradient in self._has_gradient]


def with_gradients(values: Sequence[Any], crossings: Sequence[CrossingSpec]) -> list[Any]:
    """Returns the values of the crossings whose gradients are sent back."""
    return [value for value, crossing in zip(values, crossings, strict=True) if crossing.has_gradient]


def _source_tensor(output: tf.Tensor) -> tf.Tensor:
    """Returns the tensor behind the output of a function; the output itself waits for all side effects."""
    return output.op.inputs[0]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | tf.TensorSpec)
