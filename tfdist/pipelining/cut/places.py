"""Cut points of a model: after given layers, or so that stages cost about the same."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.grammar.cut import AfterLayers, Balanced
from tfdist.grammar.spec import nearest
from tfdist.pipelining.cut.abstract_run import AbstractRun
from tfdist.pipelining.cut.balance import Costs, balanced
from tfdist.pipelining.cut.graph import Call, Graph

_MOST_BYTES = (
    4.0  # that cross a cut of a balance, as a multiple of the median over all places, unless there is no other
)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a process computes and keeps, for the balance by memory.

    Attributes:
      rows: rows of one micro-batch.
      live: micro-batches whose activations each stage keeps at the same time.
    """

    rows: int
    live: Sequence[int]


def places(
    graph: Graph,
    run: AbstractRun,
    cut: AfterLayers | Balanced,
    stages: int,
    load: Load,
    seconds: Callable[[Graph], Sequence[float]],
) -> list[int]:
    """Returns the first position in `graph.order` of each stage but the first.

    Args:
      graph: graph of the model.
      run: its abstract run.
      cut: where to cut.
      stages: number of stages.
      load: for the balance by memory.
      seconds: measures each call of `graph.calls`; called for the balance by time.

    Raises:
      InputError: there are more stages than layers, the names do not give this number of stages or are not those of
        layers, two calls of a layer with state would be in different stages, or text would be sent between stages.
    """
    layers = sum(not call.is_entry for call in graph.calls)
    if stages > layers:
        raise InputError(
            f"Each stage must have a layer. Received: {stages} stages for {graph.model.name}, which has {layers} layers. "
            f"Use at most {layers} stages."
        )
    inseparable = [*_with_state(graph, run), *_not_sendable(graph, run)]
    if isinstance(cut, AfterLayers):
        found = _after_layers(graph, cut, stages)
        for calls in inseparable:
            if any(calls.first < place <= calls.last for place in found):
                raise calls.refused(str(cut))
        return found
    allowed = _allowed(graph)
    for calls in inseparable:
        allowed[calls.first + 1 : calls.last + 1] = False
    crossing = np.array([0.0, *crossing_bytes(graph, run)])
    costs = _costs(graph, run, cut, load, seconds, stages)
    sensible = allowed & (crossing <= _MOST_BYTES * (np.median(crossing[allowed]) if allowed.any() else 0.0))
    balanced_places = balanced(costs, crossing, sensible) or balanced(costs, crossing, allowed)
    if balanced_places is None:
        any_calls = _Inseparable(_STATE, graph.model.name, 0, 0)
        raise (inseparable[0] if inseparable else any_calls).refused(f"{stages} stages")
    return balanced_places


class _Inseparable(NamedTuple):
    """Calls that must be in one stage.

    Attributes:
      rule: the reason, with places for what was received and for the name.
      name: name of a call.
      first: position of the first call.
      last: position of the last call.
    """

    rule: str
    name: str
    first: int
    last: int

    def refused(self, received: str) -> InputError:
        """Returns the error for a cut between the calls."""
        return InputError(self.rule.format(received=received, name=self.name))


_STATE = (
    "All calls of a layer with state must be in one stage, as one process has its state. Received: {received}, with calls of "
    "{name} in several. Cut elsewhere, or use a layer of its own for each call."
)
_NOT_SENDABLE = (
    "Stages send each other dense tensors of numbers, no text and no sparse or ragged tensors. Received: {received}, where a "
    "later stage uses the result of {name}. Cut after the layers that use it, or use fewer stages."
)


def _allowed(graph: Graph) -> np.ndarray:
    """Returns before which positions may be cut: not before the first, nor directly after the entry of a nested model."""
    ordered = [graph.calls[i] for i in graph.order]
    return np.array([False, *(not call.is_entry for call in ordered[:-1]), False])


def _with_state(graph: Graph, run: AbstractRun) -> list[_Inseparable]:
    """Returns for each variable that a training step assigns and several calls use: these calls."""
    written = {key for used in run.usage for key in used.written}
    users: dict[int, list[int]] = {}
    for position, i in enumerate(graph.order):
        for key in written.intersection(run.usage[i].variables):
            users.setdefault(key, []).append(position)
    several = [positions for positions in users.values() if len(positions) > 1]
    return [_Inseparable(_STATE, graph.calls[graph.order[found[0]]].name, found[0], found[-1]) for found in several]


def _not_sendable(graph: Graph, run: AbstractRun) -> list[_Inseparable]:
    """Returns for each tensor that cannot be sent: from the call that makes it to the last one that uses it."""
    last = last_uses(graph, {call: position for position, call in enumerate(graph.order)}, len(graph.order) - 1)
    return [
        _Inseparable(_NOT_SENDABLE, graph.calls[i].name, position, last[tensor])
        for position, i in enumerate(graph.order)
        for tensor in graph.calls[i].outputs
        if tensor not in run.sendable and last.get(tensor, position) > position
    ]


def _after_layers(graph: Graph, cut: AfterLayers, stages: int) -> list[int]:
    if len(cut.names) != stages - 1:
        raise InputError(
            f"--cut must name one layer fewer than there are stages. Received: {cut}, for {stages} stages. Name "
            f"{stages - 1} layer{'s'[: stages != 2]}, or use --cut=auto."
        )
    ordered = [graph.calls[i] for i in graph.order]
    found = [_end(ordered, name) for name in cut.names]
    for before, name, place in zip([0, *found], cut.names, found, strict=False):
        if place <= before or place == len(ordered):
            earlier = [call.name for call in ordered[: len(ordered) - 1] if not call.is_entry]
            raise InputError(
                f"--cut must name layers in the order of the model, and not its last one. Received: {cut}, with {name} "
                f"out of order. The order is {', '.join(earlier)}."
            )
    return found


def _end(ordered: Sequence[Call], name: str) -> int:
    """Returns the position after a layer, or after all layers of a nested model, by its name."""
    for pattern in (re.escape(name), rf".*/{re.escape(name)}"):  # a layer of a nested model may be named without it
        matches = [re.fullmatch(rf"({pattern}(?: \(\d+\))?)(?:/.*)?", call.name) for call in ordered]
        called = {found[1] for found in matches if found}
        if called:
            break
    else:
        known = {re.sub(r" \(\d+\)", "", call.name) for call in ordered if not call.is_entry}
        raise InputError(f"--cut must name layers of the model. Received: {name}.{nearest(name, known)}")
    if len(called) > 1:
        raise InputError(
            f"--cut must name layers that are called once. Received: {name}, which means {', '.join(sorted(called))}. "
            "Name a layer next to it."
        )
    return max(i for i, found in enumerate(matches) if found) + 1


def crossing_bytes(graph: Graph, run: AbstractRun) -> list[int]:
    """Returns the bytes per row that cross a cut after each position of `graph.order`; see `boundaries`."""
    last = last_uses(graph, {call: position for position, call in enumerate(graph.order)}, len(graph.order) - 1)
    change = [0] * (len(graph.order) + 1)
    for position, i in enumerate(graph.order):
        for tensor in graph.calls[i].outputs:
            end = last.get(tensor, position)
            change[position] += run.sizes[tensor]
            change[end] -= run.sizes[tensor]
    return [int(x) for x in np.cumsum(change[:-1])]


def last_uses(graph: Graph, place_of_call: dict[int, int], end: int) -> dict[int, int]:
    """Returns the last place in which each tensor is used, given the places of calls; outputs are used at the end."""
    found = {tensor: end for tensor in graph.outputs}
    for i, call in enumerate(graph.calls):
        for tensor in call.inputs:
            found[tensor] = max(found.get(tensor, 0), place_of_call[i])
    return found


def _costs(
    graph: Graph,
    run: AbstractRun,
    cut: Balanced,
    load: Load,
    seconds: Callable[[Graph], Sequence[float]],
    stages: int,
) -> Costs:
    n = len(graph.order)
    if cut.by == "time":
        measured = np.array(seconds(graph))[graph.order]
        return Costs(np.zeros((n + 1, n + 1)), measured, [1.0] * stages)
    activations = np.array([run.usage[i].activations for i in graph.order], float)
    weights = [float(load.rows * live) if cut.by == "memory" else 0.0 for live in load.live]
    return Costs(_variable_bytes(graph, run), activations, weights)


def _variable_bytes(graph: Graph, run: AbstractRun) -> np.ndarray:
    """Returns the bytes of the variables of a stage from position i to before j; each is counted once."""
    n = len(graph.order)
    held = [run.usage[i].variables for i in graph.order]
    sizes = np.zeros((n + 1, n + 1))
    for start in range(n):
        seen: set[int] = set()
        total = 0
        for position in range(start, n):
            new = {key: variable for key, variable in held[position].items() if key not in seen}
            seen.update(new)
            total += sum(keras_internals.bytes_of(variable) for variable in new.values())
            sizes[start, position + 1] = total
    return sizes
