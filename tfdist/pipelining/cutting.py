"""Cuts a model into stages, each with its graph and variables."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.pipeline import BalancedCut, LayerCut, parse_cut
from tfdist.errors import InputError, one_line
from tfdist.pipelining.cut_points import LOGITS, MASK, VALUE, Crossing, boundaries, cut_positions
from tfdist.pipelining.operation_graph import AbstractRun, Call, Graph, graph_of
from tfdist.pipelining.operation_timing import measure_seconds

_STEP_METHODS = ("train_step", "compute_loss", "test_step", "predict_step")


def check_model(model: Any) -> None:
    """Raises `InputError` for a model whose graph is unknown, or that overrides a step of Keras."""
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call and not model.built:
        raise InputError(
            f"A sequential model must be built before it is cut into stages. Received: {model.name}, which is not built. "
            "Add a keras.Input as its first layer."
        )
    if keras_internals.functional_of(model) is None:
        raise InputError(
            "Only functional and sequential models can be cut into stages. Received: "
            f"{type(model).__name__}, with its own `call`. Build it as keras.Model(inputs, outputs)."
        )
    for name in _STEP_METHODS:
        if keras_internals.is_overridden(model, name):
            raise InputError(
                f"A model that is cut into stages must use Keras's own `{name}`, because no process has all layers. Received: "
                f"{type(model).__name__}, which overrides `{name}`. Pass a loss to `compile`, or use another strategy."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class StageVariables:
    """The variables of one stage, each field in the order of the model's variables."""

    all: tuple[keras.Variable, ...]  # the stage's part of `model.variables`
    metrics: tuple[keras.Variable, ...]  # variables of the metrics of layers, which `model.variables` does not contain
    external: tuple[keras.Variable, ...]  # variables that the stage reads and that belong to no layer
    shared: tuple[keras.Variable, ...]  # variables of `all` that also belong to other stages
    owned: tuple[keras.Variable, ...]  # variables of `all` that belong to no earlier stage, so one stage owns each

    @property
    def trainable(self) -> tuple[keras.Variable, ...]:
        """Variables that are currently trainable."""
        return tuple(variable for variable in self.all if variable.trainable)


def assign_variables(run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[StageVariables]:
    """Returns the variables of each stage.

    A layer's variables belong to its stage. If a layer is called in several stages, each of them has the variables that its
    calls use, such as the table of tied embeddings. Other variables that no call uses belong to the last stage.
    """
    graph = run.graph
    stage_variables: list[dict[int, keras.Variable]] = [{} for _ in range(stages)]
    default_stage: dict[int, int] = {}  # of a variable that no call uses: the first stage of its layer
    for call, usage, stage in sorted(zip(graph.calls, run.usage, stage_of, strict=True), key=lambda entry: entry[2]):
        stage_variables[stage] |= usage.variables
        for variable in (*call.layer.variables, *call.layer.metrics_variables) if call.layer is not None else ():
            default_stage.setdefault(id(variable), stage)
    variables, metrics = graph.model.variables, keras_internals.metrics_of_layers(graph.model)
    stages_of = {}
    for variable in (*variables, *metrics):
        users = [stage for stage in range(stages) if id(variable) in stage_variables[stage]]
        stages_of[id(variable)] = users or [default_stage.get(id(variable), stages - 1)]
    return [
        StageVariables(
            tuple(variable for variable in variables if stage in stages_of[id(variable)]),
            tuple(variable for variable in metrics if stage in stages_of[id(variable)]),
            tuple(variable for key, variable in stage_variables[stage].items() if key not in stages_of),
            tuple(v for v in variables if stage in stages_of[id(v)] and len(stages_of[id(v)]) > 1),
            tuple(v for v in variables if stage == stages_of[id(v)][0]),
        )
        for stage in range(stages)
    ]


def initialize(variables: StageVariables) -> None:
    """Initializes the variables of a stage that have no value, with the same values as on one device.

    Every initializer got its own seed when the model was built, so its values do not depend on other variables. Raises
    `InputError` if an initializer draws from a global random generator.
    """
    for variable in (*variables.all, *variables.metrics, *variables.external):
        if keras_internals.value_of(variable) is not None:
            continue
        previous_states = keras_internals.states_of_generators()
        keras_internals.initialize(variable)
        if keras_internals.states_of_generators() != previous_states:
            raise InputError(
                "An initializer must have a seed of its own, so that a stage draws the same values as one device. Received: "
                f"the initializer of {variable.path}, which draws from a global generator. Use one of keras.initializers, "
                "or draw with a fixed seed."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage of a model."""

    index: int  # index of the stage, from 0
    calls: tuple[Call, ...]  # in the order in which Keras runs them
    layers: tuple[keras.Layer, ...]  # each once
    inputs: tuple[str, ...]  # names of the model's inputs that the stage reads
    received: tuple[Crossing, ...]  # tensors from the previous stage
    sent: tuple[Crossing, ...]  # tensors for the next stage, including those that this stage only passes on
    variables: StageVariables
    is_last: bool
    _masked_received: frozenset[int] = dataclasses.field(repr=False)  # received tensors that get their masks
    _run: AbstractRun = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        body = keras_internals.Body(f"stage_{self.index}", self._run.graph.model, self.layers, self._forward)
        object.__setattr__(self, "_body", body)

    def call(
        self, inputs: Mapping[str, tf.Tensor], received: Sequence[tf.Tensor], training: bool | None = None
    ) -> tuple[Any, list[tf.Tensor]]:
        """Runs the stage's part of the model, eagerly or in a function.

        `inputs` are the model's inputs by name, from `Cut.named_inputs`; `received` are tensors in the order of
        `self.received`. `take_data_losses()` then returns the losses that layers have added.

        Returns:
          In the last stage, the outputs of the model with their masks; else None.
          Tensors in the order of `self.sent`.
        """
        return self._body(dict(inputs), list(received), training=training)  # type: ignore[attr-defined]

    def take_data_losses(self) -> list[tf.Tensor]:
        """Returns the losses that layers have added since the last call of this method, as means over rows."""
        return keras_internals.pop_data_losses(self._body)  # type: ignore[attr-defined]

    def weight_losses(self) -> list[tf.Tensor]:
        """Returns the regularization losses of the trainable variables that the stage owns."""
        trained_variables = [variable for variable in self.variables.owned if variable.trainable]
        return [variable.regularizer(variable) for variable in trained_variables if variable.regularizer is not None]

    def _forward(
        self, inputs: Mapping[str, Any], received: Sequence[Any], training: bool | None
    ) -> tuple[Any, list[Any]]:
        graph = self._run.graph
        values: dict[int, Any] = {graph.inputs[name]: inputs[name] for name in self.inputs}
        masks = self._unpack(received, values)
        for call in self.calls:
            call.run(values, training)
            for tensor in self._run.masks.keys() & call.outputs:
                masks[self._run.masks[tensor]], _ = keras_internals.mask_and_logits(values[tensor])
        outputs = None
        if self.is_last:
            outputs = keras_internals.pack_outputs(graph.functional, [values[x] for x in graph.outputs])
        return outputs, [self._crossing_tensor(crossing, values, masks) for crossing in self.sent]

    def _unpack(self, received: Sequence[Any], values: dict[int, Any]) -> dict[int, Any]:
        """Adds received tensors to the values; returns the masks by the first tensor that has the mask."""
        kinds: dict[str, dict[int, Any]] = {VALUE: {}, MASK: {}, LOGITS: {}}
        for crossing, tensor in zip(self.received, received, strict=True):
            kinds[crossing.kind][crossing.tensor] = tensor
        masks = {self._run.masks[tensor]: mask for tensor, mask in kinds[MASK].items()}
        for index, tensor in kinds[VALUE].items():
            values[index] = tf.identity(tensor)  # the caller's tensor gets no mask
            mask = masks[self._run.masks[index]] if index in self._masked_received else None
            keras_internals.set_mask_and_logits(values[index], mask, kinds[LOGITS].get(index))
        return masks

    def _crossing_tensor(self, crossing: Crossing, values: Mapping[int, Any], masks: Mapping[int, Any]) -> Any:
        if crossing.kind == MASK:
            return masks[self._run.masks[crossing.tensor]]
        value = values[crossing.tensor]
        return value if crossing.kind == VALUE else keras_internals.mask_and_logits(value)[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A model that has been cut into stages."""

    stages: tuple[StageGraph, ...]  # in order
    run: AbstractRun

    @property
    def graph(self) -> Graph:
        """The graph of the model."""
        return self.run.graph

    @property
    def shared(self) -> list[tuple[keras.Variable, tuple[int, ...]]]:
        """Variables that several stages share, such as tied embeddings, with the indices of the stages."""
        stages_by_id: dict[int, tuple[keras.Variable, list[int]]] = {}
        for stage in self.stages:
            for variable in stage.variables.shared:
                stages_by_id.setdefault(id(variable), (variable, []))[1].append(stage.index)
        return [(variable, tuple(stages)) for variable, stages in stages_by_id.values()]

    def call_names(self, stage: StageGraph) -> list[str]:
        """Returns the names of the calls of a stage, in the order of `Graph.order`."""
        calls = (self.graph.calls[i] for i in self.graph.order)
        return [call.name for call in calls if call in stage.calls and not call.is_entry]

    def activation_bytes(self, stage: StageGraph) -> int:
        """Returns the bytes per row that a stage's calls keep for the backward pass."""
        usages = zip(self.graph.calls, self.run.usage, strict=True)
        return sum(usage.activations for call, usage in usages if call in stage.calls)

    def unmasked_outputs(self, rows: int | tf.Tensor) -> Any:
        """Returns zeros in the shapes of the model's outputs; None if an output has a mask or an unknown size."""
        tensors = [self.graph.tensors[x] for x in self.graph.outputs]
        is_masked = any(x in self.run.mask_shapes for x in self.graph.outputs)
        if is_masked or any(tensor.shape[:1] != (None,) or None in tensor.shape[1:] for tensor in tensors):
            return None
        zeros = [tf.zeros([rows, *tensor.shape[1:]], tensor.dtype) for tensor in tensors]
        return keras.tree.pack_sequence_as(self.graph.functional.output, zeros)

    def named_inputs(self, inputs: Any) -> dict[str, tf.Tensor]:
        """Returns the inputs of a call of the model by name, converted to its dtypes and ranks."""
        tensors = keras_internals.standardize_inputs(self.graph.model, inputs)
        return dict(zip(self.graph.inputs, tensors, strict=True))


def trace_model(model: keras.Model) -> AbstractRun:
    """Traces a functional or sequential model without computing anything; its variables need no values.

    Raises `InputError` if the model cannot be cut.
    """
    check_model(model)
    graph = graph_of(model)
    try:
        return AbstractRun(graph)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            "A pipeline traces the layers of its model before training. Received: "
            f"{type(error).__name__}: {one_line(str(error)).rstrip('.')}. Change the layer or its dtype."
        ) from error


def cut_model(
    model: keras.Model | AbstractRun,
    cut: str | LayerCut | BalancedCut,
    stages: int,
    *,
    seconds: Callable[[Graph], Sequence[float]] = measure_seconds,
) -> Cut:
    """Cuts a functional or sequential model, or the result of `trace_model`, into stages.

    The composition of the stages is bitwise equal to the model. For `cut`, see `parse_cut`. `seconds` returns the seconds of
    each of `Graph.calls`, to balance stages by time; by default, they are measured. Raises `InputError` if the model cannot be
    cut in this way.
    """
    run = model if isinstance(model, AbstractRun) else trace_model(model)
    cut = parse_cut(cut) if isinstance(cut, str) else cut
    return cut_at(run, cut_positions(run, cut, stages, seconds))


def cut_at(run: AbstractRun, starts: Sequence[int]) -> Cut:
    """Returns the model cut into stages; `starts` has the first position in `graph.order` of each stage but the first."""
    graph, stages = run.graph, len(starts) + 1
    stage_of = [0] * len(graph.calls)
    for position, call in enumerate(graph.order):
        stage_of[call] = sum(position >= start for start in starts)
    stage_boundaries = boundaries(run, stage_of, stages)
    variables = assign_variables(run, stage_of, stages)
    names = {index: name for name, index in graph.inputs.items()}
    stage_graphs = []
    for stage in range(stages):
        calls = tuple(call for call, call_stage in zip(graph.calls, stage_of, strict=True) if call_stage == stage)
        (received, masked_received), (sent, _) = stage_boundaries[stage : stage + 2]
        is_last = stage == stages - 1
        tensors_read = {x for call in calls for x in call.inputs} | (set(graph.outputs) if is_last else set())
        stage_graphs.append(
            StageGraph(
                stage,
                calls,
                tuple(dict.fromkeys(call.layer for call in calls if call.layer is not None)),
                tuple(name for index, name in names.items() if index in tensors_read),
                received,
                sent,
                variables[stage],
                is_last,
                masked_received,
                run,
            )
        )
    return Cut(tuple(stage_graphs), run)
