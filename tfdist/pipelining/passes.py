"""The forward and the backward pass of a stage as functions, which are traced once and called for each micro-batch.

The backward pass is traced inside of the trace of the forward pass. The tensors of the forward pass that it uses are the
residuals: results of the one function and arguments of the other. So nothing else connects the two, and they may be called in
different functions, in different steps, or eagerly.

The backward pass may have two parts. The first computes the gradients of the stage's inputs, and the second all
others; no operation is computed twice. Qi et al., Zero Bubble Pipeline Parallelism, 2024 (arXiv:2401.10241).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

from tfdist import keras_internals
from tfdist.pipelining.stage_costs import CrossingSpec, with_static_shapes

Operations = frozenset[tf.Operation]
_READS = ("ReadVariableOp", "ResourceGather", "VariableShape")  # stateful, but their only effect is their result


def operations_before(targets: Iterable[tf.Tensor | tf.Operation]) -> Operations:
    """Returns the operations of a graph that targets need, also as control inputs, with those that compute the targets."""
    pending = [target.op if isinstance(target, tf.Tensor) else target for target in targets]
    operations: set[tf.Operation] = set()
    while pending:
        operation = pending.pop()
        if operation not in operations:
            operations.add(operation)
            pending += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return frozenset(operations)


def with_effects(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of a function's graph that run even if nothing needs their results."""
    return [operation for operation in graph.control_outputs if operation.type not in _READS]


def inputs_of(operations: Operations, outputs: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors from other operations that these operations, or the outputs of their part, use."""
    used = [tensor for operation in operations for tensor in operation.inputs]
    needed = {tensor.name: tensor for tensor in [*used, *outputs] if tensor.op not in operations}
    return [needed[name] for name in sorted(needed)]


def extract_function(
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
      values: other tensors that the operations use, by name in the graph: handles of variables, which the function
        captures, and constants.
    """
    definition = _definition(graph, operations)
    effects = [operation.name for operation in with_effects(graph) if operation in operations]
    inner = [tensor for tensor in outputs if tensor.op in operations]

    def part(*arguments: tf.Tensor) -> list[tf.Tensor]:
        used = {tensor.name for operation in operations for tensor in operation.inputs}
        tensors = {name: _captured(value) for name, value in values.items() if name in used}
        tensors |= {tensor.name: argument for tensor, argument in zip(inputs, arguments, strict=True)}
        keras_internals.add_functions(graph)
        results = tf.graph_util.import_graph_def(
            definition,
            {name: tensor for name, tensor in tensors.items() if name in used},
            [*(tensor.name for tensor in inner), *effects],
            name="part",
        )
        with tf.control_dependencies(results[len(inner) :]):
            tf.compat.v1.get_default_graph().control_outputs.append(tf.no_op())
        for tensor, value in zip(inner, results[: len(inner)], strict=True):
            value.set_shape(tensor.shape)
            tensors[tensor.name] = value
        return [tf.identity(tensors[tensor.name]) for tensor in outputs]

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    return tf.function(part, autograph=False).get_concrete_function(*specs)


def _captured(value: Any) -> tf.Tensor:
    """Returns a tensor of the current function's graph."""
    return tf.compat.v1.get_default_graph().capture(value) if isinstance(value, tf.Tensor) else tf.constant(value)


def _definition(graph: tf.Graph, operations: Operations) -> tf.compat.v1.GraphDef:
    """Returns the definition of operations, without control inputs from others, and without constraints of colocation."""
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


Function: TypeAlias = Any  # a concrete function
Gradient: TypeAlias = tf.Tensor | None  # None if the loss does not depend on the variable


class Forward(NamedTuple):
    """The result of the forward pass of a stage with one micro-batch, while it is traced.

    Attributes:
      sent: tensors for the next stage.
      loss: scalar, also differentiated: in the last stage the loss, elsewhere losses of its own layers.
      share: scalar; contribution of the micro-batch to the reported loss.
    """

    sent: Sequence[tf.Tensor]
    loss: tf.Tensor
    share: tf.Tensor


class Stage(Protocol):
    """A stage of a model, as it is traced."""

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Values of the trainable variables of the stage."""

    @property
    def received(self) -> Sequence[CrossingSpec]:
        """The tensors that the previous stage sends."""

    @property
    def sent(self) -> Sequence[CrossingSpec]:
        """The tensors that it sends to the next stage."""

    def forward(self, arguments: Any, received: Sequence[tf.Tensor]) -> Forward:
        """Computes the forward pass of a micro-batch, in a tape, from tensors that are arguments, and from variables."""

    def gradients(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> Sequence[Gradient]:
        """Returns the gradients of the variables as they are summed over micro-batches."""


class ForwardResult(NamedTuple):
    """The result of a forward pass.

    Attributes:
      sent: tensors for the next stage.
      share: scalar; contribution of the micro-batch to the reported loss.
      residuals: inputs of the backward pass, including the values of variables that the forward pass has read.
    """

    sent: list[tf.Tensor]
    share: tf.Tensor
    residuals: list[tf.Tensor]


class BackwardResult(NamedTuple):
    """The result of a backward pass.

    Attributes:
      of_variables: gradients of the variables, in their order.
      of_inputs: gradients of the received tensors that have one, for the previous stage.
    """

    of_variables: list[Gradient]
    of_inputs: list[tf.Tensor]


class InputResult(NamedTuple):
    """The result of the first part of a backward pass.

    Attributes:
      of_inputs: gradients of the received tensors that have one, for the previous stage.
      residuals: inputs of the second part.
    """

    of_inputs: list[tf.Tensor]
    residuals: list[tf.Tensor]


class Passes:
    """The passes of a stage; callable eagerly, or any number of times in a function.

    Side effects of the forward pass, such as updates of metrics, happen in each call.

    Attributes:
      uses: for each received tensor that has a gradient, whether the results depend on it; otherwise its gradient is zeros.
    """

    uses: list[bool]

    def __init__(self, stage: Stage, arguments: Any, split: bool = False):
        """Traces the passes.

        Args:
          stage: the stage.
          arguments: structure of the arguments of `stage.forward`. Tensors are arguments, whose
            values may change from call to call; other leaves are constant.
          split: whether the backward pass has two parts.
        """
        self._stage, self._split = stage, split
        self._leaves = tf.nest.flatten(arguments, expand_composites=True)
        self._structure = arguments
        specs = [*self._tensors(arguments), *(crossing.spec for crossing in stage.received)]
        traced = tf.function(self._trace, autograph=False)
        self._forward = traced.get_concrete_function(*(tf.TensorSpec(x.shape, x.dtype) for x in specs))
        self._check_captures()
        self._extract()

    def forward(self, arguments: Any, received: Sequence[tf.Tensor]) -> ForwardResult:
        """Computes the forward pass of a micro-batch."""
        results = self._forward(*self._tensors(arguments), *received)
        count = len(self._stage.sent)
        return ForwardResult(results[:count], results[count], results[count + 1 :])

    def backward(self, residuals: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> BackwardResult:
        """Computes the backward pass.

        Args:
          residuals: those of the forward pass.
          gradients: of the tensors that were sent and have one, from the next stage.
        """
        if self._split:
            of_inputs, left = self.backward_input(residuals, gradients)
            return BackwardResult(self.backward_weight(left), of_inputs)
        results = self._backward(*residuals, *gradients)
        count = len(results) - len(self._of_inputs)
        return BackwardResult(self._with_none(results[:count]), results[count:])

    def backward_input(self, residuals: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> InputResult:
        """Computes the first part of the backward pass: the gradients for which the previous stage waits.

        Args:
          residuals: those of the forward pass.
          gradients: of the tensors that were sent and have one, from the next stage.
        """
        arguments = [*residuals, *gradients]
        results = self._backward_input(*(arguments[i] for i in self._indices_of_input))
        count = len(self._of_inputs)
        return InputResult(results[:count], [*results[count:], *(arguments[i] for i in self._indices_of_weight)])

    def backward_weight(self, residuals: Sequence[tf.Tensor]) -> list[Gradient]:
        """Computes the second part of the backward pass: the gradients of the variables.

        Args:
          residuals: those of the first part.
        """
        return self._with_none(self._backward_weight(*residuals))

    @property
    def parts(self) -> tuple[Function, ...]:
        """The functions of the backward pass: one, or two if it is split."""
        return (self._backward_input, self._backward_weight) if self._split else (self._backward,)

    def _trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Returns the results of the forward pass, and traces the backward pass."""
        stage = self._stage
        count = len(tensors) - len(stage.received)
        with tf.GradientTape() as tape:
            inputs = [tf.identity(tensor) for tensor in tensors[count:]]
            tape.watch(with_gradients(inputs, stage.received))
            sent, loss, share = stage.forward(self._structured(tensors[:count]), inputs)
            sent = with_static_shapes(sent, stage.sent)
            sent = [tf.identity(tensor) for tensor in sent]  # one that only passes through is a target and a source
        sources = [*stage.variables, *with_gradients(inputs, stage.received)]
        targets = [*with_gradients(sent, stage.sent), loss]

        def backward(*gradients: tf.Tensor) -> tuple[list[Gradient], list[tf.Tensor]]:
            results = tape.gradient(targets, sources, output_gradients=[*gradients, tf.ones_like(loss)])
            own, of_inputs = results[: len(stage.variables)], results[len(stage.variables) :]
            self.uses = [gradient is not None for gradient in of_inputs]
            crossings = with_gradients(stage.received, stage.received)
            complete = [
                tf.zeros(crossing.spec.shape, crossing.spec.dtype)
                if gradient is None
                else tf.convert_to_tensor(gradient)
                for gradient, crossing in zip(of_inputs, crossings, strict=True)
            ]
            return list(stage.gradients(own)), with_static_shapes(complete, crossings)

        specs = [crossing.spec for crossing in with_gradients(stage.sent, stage.sent)]
        self._traced = tf.function(backward, autograph=False).get_concrete_function(*specs)
        return [*sent, share, *self._find_residuals()]

    def _find_residuals(self) -> list[tf.Tensor]:
        """Returns the tensors of the forward pass, whose graph is the current one, that the backward pass needs."""
        graph = self._traced.graph
        of_variables, self._of_inputs = self._traced.structured_outputs
        self._gradients_of = [gradient is not None for gradient in of_variables]
        self._of_variables = [_result(gradient) for gradient in of_variables if gradient is not None]
        self._of_inputs = [_result(gradient) for gradient in self._of_inputs]
        effects = with_effects(graph)
        self._needed = operations_before([*self._of_variables, *self._of_inputs, *effects])
        outside = {id(inner): outer for outer, inner in tf.compat.v1.get_default_graph().captures}
        residuals: list[tf.Tensor] = []
        self._values: dict[str, Any] = {}
        self._arguments: list[tf.Tensor] = []
        for outer, inner in graph.captures:
            if inner.op not in self._needed:
                continue
            if not hasattr(outer, "graph") or id(outer) in outside:
                self._values[inner.name] = outside.get(id(outer), outer)
            elif outer.op.type == "Const":
                self._values[inner.name] = tf.get_static_value(outer)
            else:
                residuals.append(outer)
                self._arguments.append(inner)
        captured = {id(inner) for _, inner in graph.captures}
        self._arguments += [tensor for tensor in graph.inputs if id(tensor) not in captured]
        return residuals

    def _extract(self) -> None:
        """Extracts the functions of the backward pass."""
        graph = self._traced.graph
        outside = frozenset(tensor.op for tensor in graph.inputs)
        results = [*self._of_variables, *self._of_inputs]
        if not self._split:
            self._backward = extract_function(graph, self._needed - outside, self._arguments, results, self._values)
            return
        of_input = operations_before(self._of_inputs) - outside
        of_weight = self._needed - outside - of_input
        of_weight |= {x for x in operations_before(of_weight) if x.type == "Const"}  # which several parts may contain
        crossing = [x for x in inputs_of(of_weight, self._of_variables) if x.name not in self._values]
        computed, arguments = (
            [x for x in crossing if (x.op in outside) is is_argument] for is_argument in (False, True)
        )
        indices = {tensor.name: i for i, tensor in enumerate(self._arguments)}
        used = [x for x in inputs_of(of_input, self._of_inputs) if x.name not in self._values]
        self._indices_of_input = [indices[tensor.name] for tensor in used]
        self._indices_of_weight = [indices[tensor.name] for tensor in arguments]
        self._backward_input = extract_function(graph, of_input, used, [*self._of_inputs, *computed], self._values)
        self._backward_weight = extract_function(
            graph, of_weight, [*computed, *arguments], self._of_variables, self._values
        )

    def _check_captures(self) -> None:
        """Raises `ValueError` if a pass would depend on a tensor of the function in which it is traced."""
        for outer, _ in self._forward.graph.captures:
            if hasattr(outer, "graph"):
                raise ValueError(f"The passes of a stage depend on arguments and variables alone. Received: {outer}.")

    def _tensors(self, arguments: Any) -> list[tf.Tensor]:
        """Returns the tensors among the leaves of arguments."""
        leaves = tf.nest.flatten(arguments, expand_composites=True)
        return [leaf for leaf, first in zip(leaves, self._leaves, strict=True) if _is_tensor(first)]

    def _structured(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns arguments with these tensors, and all other leaves as they were when the passes were created."""
        values = iter(tensors)
        leaves = [next(values) if _is_tensor(leaf) else leaf for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)

    def _with_none(self, gradients: Sequence[tf.Tensor]) -> list[Gradient]:
        """Returns the gradient of each variable, None for those without one."""
        values = iter(gradients)
        return [next(values) if has_gradient else None for has_gradient in self._gradients_of]


def with_gradients(values: Sequence[Any], crossings: Sequence[CrossingSpec]) -> list[Any]:
    """Returns the values of the crossings whose gradients are sent back."""
    return [value for value, crossing in zip(values, crossings, strict=True) if crossing.has_gradient]


def _result(output: tf.Tensor) -> tf.Tensor:
    """Returns the source of an output of a function; the output itself waits for all side effects of the function."""
    return output.op.inputs[0]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | tf.TensorSpec)
