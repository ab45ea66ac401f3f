"""Cuts a model into stages: the graph and the variables of each."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.pipeline import AfterLayers, Balanced, parse_cut
from tfdist.errors import InputError
from tfdist.errors.engine_errors import one_line
from tfdist.pipelining.cut_points import LOGITS, MASK, VALUE, Boundary, Crossing, boundaries, cut_positions
from tfdist.pipelining.operation_graph import AbstractRun, Call, Graph, graph_of, run_abstractly
from tfdist.pipelining.operation_timing import measure_seconds

_REPLACED = ("train_step", "compute_loss", "test_step", "predict_step")


def check_model(model: Any) -> None:
    """Checks that a model has a graph that can be cut, and no step of its own.

    Raises:
      InputError: it does not.
    """
    if not isinstance(model, keras.Model):
        raise InputError(
            f"Stages are cut from a keras.Model. Received: {type(model).__name__}. Build one with keras.Model."
        )
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call and not model.built:
        raise InputError(
            f"A sequential model must know its input to be cut into stages. Received: {model.name}, which is not built. "
            "Give it a keras.Input as its first layer."
        )
    if keras_internals.functional_of(model) is None:
        raise InputError(
            "Stages are cut from functional and sequential models, whose layers are known. Received: "
            f"{type(model).__name__}, with a `call` of its own. Build it as keras.Model(inputs, outputs)."
        )
    for name in _REPLACED:
        if getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model):
            raise InputError(
                f"A model that is cut into stages must use Keras's own `{name}`: no process has all of it. Received: "
                f"{type(model).__name__}, with a `{name}` of its own. Use a loss of `compile`, or another strategy."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class StageVariables:
    """The variables of one stage, each in the order of the model's.

    Attributes:
      all: the stage's part of `model.variables`.
      metrics: state of metrics that layers update, which Keras does not count as the model's variables.
      others: variables that its calls read and no layer has.
      shared: those of `all` that other stages have, too.
      owned: those of `all` that no earlier stage has: over the stages, each variable once.
    """

    all: tuple[keras.Variable, ...]
    metrics: tuple[keras.Variable, ...]
    others: tuple[keras.Variable, ...]
    shared: tuple[keras.Variable, ...]
    owned: tuple[keras.Variable, ...]

    @property
    def trainable(self) -> tuple[keras.Variable, ...]:
        """Variables with gradients, as of now."""
        return tuple(variable for variable in self.all if variable.trainable)

    @property
    def non_trainable(self) -> tuple[keras.Variable, ...]:
        """All other variables of `all`, such as moving statistics, and seeds of random layers."""
        return tuple(variable for variable in self.all if not variable.trainable)


def assign_variables(graph: Graph, run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[StageVariables]:
    """Returns the variables of each stage.

    A layer's variables belong to its stage. Of a layer that is called in several stages, each has those that its calls
    use, such as the table of tied embeddings. Variables that no call uses are in the last stage.

    Args:
      graph: graph of the model.
      run: its abstract run.
      stage_of: stage of each call of `graph.calls`.
      stages: number of stages.
    """
    used: list[dict[int, keras.Variable]] = [{} for _ in range(stages)]
    layers: dict[int, set[int]] = {}
    for call, usage, stage in zip(graph.calls, run.usage, stage_of, strict=True):
        used[stage] |= usage.variables
        layers.setdefault(id(call.layer), set()).add(stage)
    default_stage: dict[int, int] = {}  # of a variable that no call uses
    for call in graph.calls:
        if call.layer is not None:
            for variable in (*call.layer.variables, *call.layer.metrics_variables):
                default_stage.setdefault(id(variable), min(layers[id(call.layer)]))
    variables, metrics = graph.model.variables, keras_internals.metrics_of_layers(graph.model)
    stages_of = {}
    for variable in (*variables, *metrics):
        users = [stage for stage in range(stages) if id(variable) in used[stage]]
        stages_of[id(variable)] = users or [default_stage.get(id(variable), stages - 1)]
    return [
        StageVariables(
            tuple(variable for variable in variables if stage in stages_of[id(variable)]),
            tuple(variable for variable in metrics if stage in stages_of[id(variable)]),
            tuple(variable for key, variable in used[stage].items() if key not in stages_of),
            tuple(v for v in variables if stage in stages_of[id(v)] and len(stages_of[id(v)]) > 1),
            tuple(v for v in variables if stage == stages_of[id(v)][0]),
        )
        for stage in range(stages)
    ]


def initialize(variables: StageVariables) -> None:
    """Gives the variables of a stage that have no value yet the initial values that they would have on one device.

    Initializers have a seed of their own from the time when the model was built, so that the values do not depend on
    which variables are initialized. Variables that were created with values keep them.

    Raises:
      InputError: an initializer draws from a generator that others use, so that its values would depend on them.
    """
    for variable in (*variables.all, *variables.metrics, *variables.others):
        if keras_internals.value_of(variable) is not None:
            continue
        before = keras_internals.states_of_generators()
        keras_internals.initialize(variable)
        if keras_internals.states_of_generators() != before:
            raise InputError(
                "An initializer must have a seed of its own, so that a stage draws the same values as one device. Received: "
                f"the initializer of {variable.path}, which draws from a global generator. Use one of keras.initializers, "
                "or draw with a fixed seed."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage of a model.

    Attributes:
      index: number of the stage, from 0.
      calls: its calls of operations, in the order in which Keras runs them.
      layers: its layers, each once.
      inputs: names of the model's inputs that it reads.
      received: tensors that the previous stage sends.
      sent: tensors that this stage sends to the next, including those that it only passes on.
      variables: its variables.
    """

    index: int
    calls: tuple[Call, ...]
    layers: tuple[keras.Layer, ...]
    inputs: tuple[str, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]
    variables: StageVariables
    is_last: bool
    _masked: frozenset[int] = dataclasses.field(repr=False)  # received tensors that get their masks
    _graph: Graph = dataclasses.field(repr=False)
    _run: AbstractRun = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        """Creates the layer that calls the stage's layers."""
        body = keras_internals.Body(f"stage_{self.index}", self._graph.model, self.layers, self._forward)
        object.__setattr__(self, "_body", body)

    def call(
        self, inputs: Mapping[str, tf.Tensor], received: Sequence[tf.Tensor], training: bool | None = None
    ) -> tuple[Any, list[tf.Tensor]]:
        """Runs the stage's part of the model, eagerly or in a function.

        Losses that layers add are then returned by `take_data_losses()`.

        Args:
          inputs: tensors by the names of the model's inputs, as returned by `Cut.named_inputs`; others than those of
            `self.inputs` are ignored.
          received: tensors in the order of `self.received`.
          training: whether this is a training step.

        Returns:
          The model's outputs in the last stage, in the structure that a call of the model returns, with their masks;
            else None.
          Tensors in the order of `self.sent`.
        """
        return self._body(dict(inputs), list(received), training=training)  # type: ignore[attr-defined]

    def take_data_losses(self) -> list[tf.Tensor]:
        """Returns the losses that its layers have added since this was called before, as means over rows."""
        return keras_internals.pop_data_losses(self._body)  # type: ignore[attr-defined]

    def weight_losses(self) -> list[tf.Tensor]:
        """Returns the regularization losses of the trainable variables; of a shared one, only in its first stage."""
        owned = [variable for variable in self.variables.owned if variable.trainable]
        return [variable.regularizer(variable) for variable in owned if variable.regularizer is not None]

    def _forward(
        self, inputs: Mapping[str, Any], received: Sequence[Any], training: bool | None
    ) -> tuple[Any, list[Any]]:
        values: dict[int, Any] = {self._graph.inputs[name]: inputs[name] for name in self.inputs}
        masks = self._unpack(received, values)
        for call in self.calls:
            call.run(values, training)
            for tensor in self._run.masks.keys() & call.outputs:
                masks[self._run.masks[tensor]], _ = keras_internals.mask_and_logits(values[tensor])
        outputs = None
        if self.is_last:
            outputs = keras_internals.pack_outputs(self._graph.functional, [values[x] for x in self._graph.outputs])
        return outputs, [self._part(crossing, values, masks) for crossing in self.sent]

    def _unpack(self, received: Sequence[Any], values: dict[int, Any]) -> dict[int, Any]:
        """Adds received tensors to the values; returns the masks by the first tensor that has each."""
        kinds: dict[str, dict[int, Any]] = {VALUE: {}, MASK: {}, LOGITS: {}}
        for crossing, tensor in zip(self.received, received, strict=True):
            kinds[crossing.kind][crossing.tensor] = tensor
        masks = {self._run.masks[tensor]: mask for tensor, mask in kinds[MASK].items()}
        for number, tensor in kinds[VALUE].items():
            values[number] = tf.identity(tensor)  # the caller's tensor gets no mask
            mask = masks[self._run.masks[number]] if number in self._masked else None
            keras_internals.set_mask_and_logits(values[number], mask, kinds[LOGITS].get(number))
        return masks

    def _part(self, crossing: Crossing, values: Mapping[int, Any], masks: Mapping[int, Any]) -> Any:
        if crossing.kind == MASK:
            return masks[self._run.masks[crossing.tensor]]
        value = values[crossing.tensor]
        return value if crossing.kind == VALUE else keras_internals.mask_and_logits(value)[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A model that has been cut.

    Attributes:
      stages: the stages, in order.
      graph: graph of the model.
      run: its abstract run.
    """

    stages: tuple[StageGraph, ...]
    graph: Graph
    run: AbstractRun

    @property
    def shared(self) -> list[tuple[keras.Variable, tuple[int, ...]]]:
        """Variables that several stages use, such as tied embeddings, with the numbers of these stages."""
        stages_by_id: dict[int, tuple[keras.Variable, list[int]]] = {}
        for stage in self.stages:
            for variable in stage.variables.shared:
                stages_by_id.setdefault(id(variable), (variable, []))[1].append(stage.index)
        return [(variable, tuple(stages)) for variable, stages in stages_by_id.values()]

    def call_names(self, stage: StageGraph) -> list[str]:
        """Returns the names of a stage's calls of layers and other operations, in the order in which the model is cut."""
        calls = (self.graph.calls[i] for i in self.graph.order)
        return [call.name for call in calls if call in stage.calls and not call.is_entry]

    def activation_bytes(self, stage: StageGraph) -> int:
        """Returns the bytes per row that a stage's calls keep for the backward pass."""
        usages = zip(self.graph.calls, self.run.usage, strict=True)
        return sum(usage.activations for call, usage in usages if call in stage.calls)

    def unmasked_outputs(self, rows: int | tf.Tensor) -> Any:
        """Returns zeros of the shapes of the model's outputs; None if an output has a mask or a size is unknown.

        Args:
          rows: number of rows.
        """
        tensors = [self.graph.tensors[x] for x in self.graph.outputs]
        is_masked = any(x in self.run.mask_shapes for x in self.graph.outputs)
        if is_masked or any(tensor.shape[:1] != (None,) or None in tensor.shape[1:] for tensor in tensors):
            return None
        zeros = [tf.zeros([rows, *tensor.shape[1:]], tensor.dtype) for tensor in tensors]
        return keras.tree.pack_sequence_as(self.graph.functional.output, zeros)

    def named_inputs(self, inputs: Any) -> dict[str, tf.Tensor]:
        """Returns the inputs of a model by name, given in any structure that a call of the model accepts.

        They get the dtypes and ranks that the model gives them.
        """
        tensors = keras_internals.standardize_inputs(self.graph.model, inputs)
        return dict(zip(self.graph.inputs, tensors, strict=True))


class TracedModel(NamedTuple):
    """A model that can be cut in several ways.

    Attributes:
      graph: its graph.
      run: its abstract run.
    """

    graph: Graph
    run: AbstractRun


def trace_model(model: keras.Model) -> TracedModel:
    """Traces a functional or sequential model, without computing anything; its variables need no values.

    Args:
      model: functional or sequential model; layers count as trainable if they are now.

    Raises:
      InputError: the model cannot be cut.
    """
    check_model(model)
    graph = graph_of(model)
    try:
        return TracedModel(graph, run_abstractly(graph))
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            "A pipeline traces the layers of its model before training. Received: "
            f"{type(error).__name__}: {one_line(str(error)).rstrip('.')}. Change the layer or its dtype."
        ) from error


def cut_model(
    model: keras.Model | TracedModel,
    cut: str | AfterLayers | Balanced,
    stages: int,
    *,
    seconds: Callable[[Graph], Sequence[float]] = measure_seconds,
) -> Cut:
    """Cuts a functional or sequential model into stages.

    Args:
      model: functional or sequential model, see `trace_model`; a traced one is not traced again.
      cut: where, as `parse_cut` describes.
      stages: number of stages.
      seconds: for the balance by time, returns the time of each of `Graph.calls`; by default they are measured here.

    Returns:
      The stages; chained, they compute the same as the model, bit for bit.

    Raises:
      InputError: the model cannot be cut, or not in this way.
    """
    graph, run = model if isinstance(model, TracedModel) else trace_model(model)
    cut = parse_cut(cut) if isinstance(cut, str) else cut
    return cut_at(graph, run, cut_positions(graph, run, cut, stages, seconds))


def cut_at(graph: Graph, run: AbstractRun, starts: Sequence[int]) -> Cut:
    """Returns the model cut into stages.

    Args:
      graph: graph of the model.
      run: its abstract run.
      starts: first position in `graph.order` of each stage but the first.
    """
    stages = len(starts) + 1
    stage_of = [0] * len(graph.calls)
    for position, call in enumerate(graph.order):
        stage_of[call] = sum(position >= start for start in starts)
    between = [*boundaries(graph, run, stage_of, stages), Boundary()]
    variables = assign_variables(graph, run, stage_of, stages)
    names = {number: name for name, number in graph.inputs.items()}
    stage_graphs = []
    for stage in range(stages):
        calls = tuple(call for call, own_stage in zip(graph.calls, stage_of, strict=True) if own_stage == stage)
        is_last = stage == stages - 1
        read = {x for call in calls for x in call.inputs} | (set(graph.outputs) if is_last else set())
        stage_graphs.append(
            StageGraph(
                stage,
                calls,
                tuple(dict.fromkeys(call.layer for call in calls if call.layer is not None)),
                tuple(name for number, name in names.items() if number in read),
                between[stage].crossings,
                between[stage + 1].crossings,
                variables[stage],
                is_last,
                between[stage].masked,
                graph,
                run,
            )
        )
    return Cut(tuple(stage_graphs), graph, run)
