"""Cuts a model into stages."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.errors.engine_errors import one_line
from tfdist.grammar.cut import AfterLayers, Balanced, parse_cut
from tfdist.pipelining.cut.abstract_run import AbstractRun, run_abstractly
from tfdist.pipelining.cut.boundaries import Boundary, boundaries
from tfdist.pipelining.cut.graph import Graph, graph_of
from tfdist.pipelining.cut.model_requirements import check_model
from tfdist.pipelining.cut.places import Load, places
from tfdist.pipelining.cut.stage_graph import StageGraph
from tfdist.pipelining.cut.timing import measure_seconds
from tfdist.pipelining.cut.variables import assign_variables


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
        found: dict[int, tuple[keras.Variable, list[int]]] = {}
        for stage in self.stages:
            for variable in stage.variables.shared:
                found.setdefault(id(variable), (variable, []))[1].append(stage.index)
        return [(variable, tuple(stages)) for variable, stages in found.values()]

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
        tensors = keras_internals.standardized(self.graph.model, inputs)
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
      model: functional or sequential model; which layers are trainable is taken from now.

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
    rows: int = 1,
    live: Sequence[int] | None = None,
    seconds: Callable[[Graph], Sequence[float]] | None = None,
) -> Cut:
    """Cuts a functional or sequential model into stages.

    Args:
      model: functional or sequential model, see `trace_model`; a traced one is not traced again.
      cut: where, as `parse_cut` describes.
      stages: number of stages.
      rows: rows of a micro-batch, for the balance by memory or time.
      live: for the balance by memory, how many micro-batches each stage keeps at the same time; one by default.
      seconds: for the balance by time, returns the time of each of `Graph.calls`; by default they are measured here.

    Returns:
      The stages; chained, they compute the same as the model, bit for bit.

    Raises:
      InputError: the model cannot be cut, or not in this way.
    """
    graph, run = model if isinstance(model, TracedModel) else trace_model(model)
    cut = parse_cut(cut) if isinstance(cut, str) else cut
    load = Load(rows, [1] * stages if live is None else live)
    measure = seconds or functools.partial(measure_seconds, rows=rows)
    return assemble(graph, run, places(graph, run, cut, stages, load, measure))


def assemble(graph: Graph, run: AbstractRun, starts: Sequence[int]) -> Cut:
    """Makes the stages.

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
    made = []
    for stage in range(stages):
        calls = tuple(call for call, place in zip(graph.calls, stage_of, strict=True) if place == stage)
        is_last = stage == stages - 1
        read = {x for call in calls for x in call.inputs} | (set(graph.outputs) if is_last else set())
        here = {x for call in calls for x in call.outputs} | {x.tensor for x in between[stage].crossings}
        made.append(
            StageGraph(
                stage,
                calls,
                tuple(dict.fromkeys(call.layer for call in calls if call.layer is not None)),
                tuple(name for number, name in names.items() if number in read),
                between[stage].crossings,
                between[stage + 1].crossings,
                tuple(graph.tensors[x].name for x in graph.outputs if x in here),
                variables[stage],
                is_last,
                between[stage].masked,
                graph,
                run,
            )
        )
    return Cut(tuple(made), graph, run)
