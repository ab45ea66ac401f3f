"""Finds the cut points of a model: after given layers, or at positions that balance the costs of the stages."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.pipeline import BalancedCut, LayerCut
from tfdist.errors import InputError, nearest
from tfdist.pipelining.operation_graph import AbstractRun, Call, Graph

SLACK = 0.05  # the most expensive stage may exceed the minimum by this fraction, to send fewer bytes


def balance(costs: np.ndarray, stages: int, cut_bytes: np.ndarray, is_allowed: np.ndarray) -> list[int] | None:
    """Returns balanced cuts: the index of the first element of every stage except stage 0.

    Minimizes the bytes that cross cuts, where the highest cost of a stage may be 5% above the minimum. Takes
    O(stages * n^2) by dynamic programming. Returns None if too few cuts are allowed.

    Args:
      costs: [n + 1, n + 1]; element [i, j] is the cost of a stage with the elements i to j - 1.
      stages: number of stages.
      cut_bytes: [n + 1]; bytes that cross a cut before each element.
      is_allowed: [n + 1] bool; whether a cut before each element is allowed.
    """
    n = len(costs) - 1
    costs = np.where(np.tri(n + 1, dtype=bool), np.inf, costs)  # no stage is empty
    max_cost = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    for stage in range(stages):
        max_cost = np.maximum(max_cost[:, None], costs).min(axis=0)
        if stage < stages - 1:
            max_cost = np.where(is_allowed, max_cost, np.inf)
    if not np.isfinite(max_cost[n]):
        return None
    limit = max_cost[n] * (1 + SLACK)
    total_bytes = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    max_cost, origins = total_bytes.copy(), []
    for stage in range(stages):
        cost = np.maximum(max_cost[:, None], costs)
        bytes_so_far = np.where(cost <= limit, total_bytes[:, None], np.inf)
        min_bytes = bytes_so_far.min(axis=0)
        origin = np.where(bytes_so_far == min_bytes, cost, np.inf).argmin(axis=0)
        origins.append(origin)
        is_end = np.isfinite(min_bytes) & (is_allowed if stage < stages - 1 else True)
        total_bytes = np.where(is_end, min_bytes + cut_bytes, np.inf)
        max_cost = np.where(is_end, cost[origin, np.arange(n + 1)], np.inf)
    starts, end = [], n
    for origin in reversed(origins):
        end = int(origin[end])
        starts.append(end)
    return starts[::-1][1:]


# A balanced cut sends at most this multiple of the median bytes over all positions, unless no other cut is possible.
_MAX_RELATIVE_BYTES = 4.0


def cut_positions(
    run: AbstractRun, cut: LayerCut | BalancedCut, stages: int, seconds: Callable[[Graph], Sequence[float]]
) -> list[int]:
    """Returns the first position in `graph.order` of each stage except stage 0.

    `seconds` returns the seconds of each call of `graph.calls`; it is called only to balance stages by time.

    Raises `InputError` if there are more stages than layers, the names do not match the layers or the number of stages, calls
    of a stateful layer would be in different stages, or text would be sent between stages.
    """
    graph = run.graph
    layers = sum(not call.is_entry for call in graph.calls)
    if stages > layers:
        raise InputError(
            f"Each stage must have a layer. Received: {stages} stages for {graph.model.name}, which has {layers} layers. "
            f"Use at most {layers} stages."
        )
    inseparable = [*_stateful_calls(run), *_unsendable_tensors(run)]
    if isinstance(cut, LayerCut):
        positions = _layer_positions(graph, cut, stages)
        for calls in inseparable:
            if any(calls.first < position <= calls.last for position in positions):
                raise calls.error(str(cut))
        return positions
    # Stages after the first start neither at the first position nor after a nested model's entry.
    is_allowed = np.array([False, *(not graph.calls[i].is_entry for i in graph.order[:-1]), False])
    for calls in inseparable:
        is_allowed[calls.first + 1 : calls.last + 1] = False
    cut_bytes = np.array([0.0, *crossing_bytes(run)])
    if cut.by == "time":
        costs = _range_sums(np.array(seconds(graph))[graph.order])
    else:
        costs = _variable_bytes(run)
    if cut.by == "memory":
        costs += _range_sums([run.usage[i].activations for i in graph.order])
    median = np.median(cut_bytes[is_allowed]) if is_allowed.any() else 0.0
    is_preferred = is_allowed & (cut_bytes <= _MAX_RELATIVE_BYTES * median)
    cuts = balance(costs, stages, cut_bytes, is_preferred) or balance(costs, stages, cut_bytes, is_allowed)
    if cuts is None:
        all_calls = _InseparableCalls(_STATE_RULE, graph.model.name, 0, 0)
        raise (inseparable[0] if inseparable else all_calls).error(f"{stages} stages")
    return cuts


class _InseparableCalls(NamedTuple):
    """Calls that must be in one stage, at the positions `first` to `last`."""

    rule: str  # format string of the error, with the fields `received` and `name`
    name: str  # of one of the calls
    first: int
    last: int

    def error(self, received: str) -> InputError:
        return InputError(self.rule.format(received=received, name=self.name))


_STATE_RULE = (
    "All calls of a layer with state must be in one stage, whose process holds the state. Received: {received}, with "
    "calls of {name} in several stages. Cut elsewhere, or use a separate layer for each call."
)
_SEND_RULE = (
    "Stages can send only dense tensors of numbers, not text, sparse tensors or ragged tensors. Received: {received}, where a "
    "later stage uses the result of {name}. Cut after the layers that use it, or use fewer stages."
)


def _stateful_calls(run: AbstractRun) -> list[_InseparableCalls]:
    """Returns the calls that share a variable that a training step assigns."""
    assigned_keys = {key for usage in run.usage for key in usage.assigned}
    users: dict[int, list[int]] = {}
    for position, i in enumerate(run.graph.order):
        for key in assigned_keys.intersection(run.usage[i].variables):
            users.setdefault(key, []).append(position)
    return [
        _InseparableCalls(_STATE_RULE, run.graph.calls[run.graph.order[first]].name, first, last)
        for first, *_, last in (positions for positions in users.values() if len(positions) > 1)
    ]


def _unsendable_tensors(run: AbstractRun) -> list[_InseparableCalls]:
    """Returns, for each tensor that cannot be sent, the calls from its producer to its last use."""
    graph, last_use = run.graph, _last_positions(run.graph)
    return [
        _InseparableCalls(_SEND_RULE, graph.calls[i].name, position, last_use[tensor])
        for position, i in enumerate(graph.order)
        for tensor in graph.calls[i].outputs
        if tensor not in run.sendable_tensors and last_use.get(tensor, position) > position
    ]


def _layer_positions(graph: Graph, cut: LayerCut, stages: int) -> list[int]:
    if len(cut.names) != stages - 1:
        raise InputError(
            f"--cut must name one layer fewer than there are stages. Received: {cut}, for {stages} stages. Name "
            f"{stages - 1} layer{'s'[: stages != 2]}, or use --cut=auto."
        )
    calls = [graph.calls[i] for i in graph.order]
    positions = [_end_position(calls, name) for name in cut.names]
    for previous, name, position in zip([0, *positions], cut.names, positions, strict=False):
        if position <= previous or position == len(calls):
            layer_names = [call.name for call in calls[: len(calls) - 1] if not call.is_entry]
            raise InputError(
                f"--cut must name layers in the order of the model, and not its last one. Received: {cut}, with {name} "
                f"last or out of order. The order is {', '.join(layer_names)}."
            )
    return positions


def _end_position(calls: Sequence[Call], name: str) -> int:
    """Returns the position after a layer, or after all layers of a nested model."""
    for pattern in (re.escape(name), rf".*/{re.escape(name)}"):  # the name of a nested model may be omitted
        matches = [re.fullmatch(rf"({pattern}(?: \(\d+\))?)(?:/.*)?", call.name) for call in calls]
        prefixes = {match[1] for match in matches if match}
        if prefixes:
            break
    else:
        layer_names = {re.sub(r" \(\d+\)", "", call.name) for call in calls if not call.is_entry}
        raise InputError(f"--cut must name layers of the model. Received: {name}.{nearest(name, layer_names)}")
    if len(prefixes) > 1:
        raise InputError(
            f"--cut must name layers that are called once. Received: {name}, which matches {', '.join(sorted(prefixes))}. "
            "Name a layer next to it."
        )
    return max(i for i, match in enumerate(matches) if match) + 1


def crossing_bytes(run: AbstractRun) -> list[int]:
    """Returns the bytes per row that cross a cut after each position of `graph.order`."""
    graph, last_use = run.graph, _last_positions(run.graph)
    change = [0] * (len(graph.order) + 1)
    for position, i in enumerate(graph.order):
        for tensor in graph.calls[i].outputs:
            end = last_use.get(tensor, position)
            change[position] += run.sizes[tensor]
            change[end] -= run.sizes[tensor]
    return [int(x) for x in np.cumsum(change[:-1])]


def _last_positions(graph: Graph) -> dict[int, int]:
    return last_uses(graph, {call: position for position, call in enumerate(graph.order)}, len(graph.order) - 1)


def last_uses(graph: Graph, position_of_call: dict[int, int], end: int) -> dict[int, int]:
    """Returns the last position at which each tensor is used; outputs of the model are used at the end."""
    last_use = {tensor: end for tensor in graph.outputs}
    for i, call in enumerate(graph.calls):
        for tensor in call.inputs:
            last_use[tensor] = max(last_use.get(tensor, 0), position_of_call[i])
    return last_use


def _range_sums(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns the sums of the values i to j - 1, [n + 1, n + 1]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, :] - total[:, None]


def _variable_bytes(run: AbstractRun) -> np.ndarray:
    """Returns the bytes of the variables of a stage with the positions i to j - 1; shared variables count once."""
    variables, n = [run.usage[i].variables for i in run.graph.order], len(run.graph.order)
    sizes = np.zeros((n + 1, n + 1))
    for start in range(n):
        counted_ids: set[int] = set()
        total = 0
        for position in range(start, n):
            new_variables = {key: variable for key, variable in variables[position].items() if key not in counted_ids}
            counted_ids.update(new_variables)
            total += sum(keras_internals.bytes_of(variable) for variable in new_variables.values())
            sizes[start, position + 1] = total
    return sizes


VALUE, MASK, LOGITS = "value", "mask", "logits"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that one stage sends to the next."""

    name: str  # with the suffix "/mask" for its Keras mask and "/logits" for its logits
    shape: tuple[int | None, ...]  # static shape; None for the number of rows, and for other unknown sizes
    dtype: str
    stage: int  # stage that computes it; the stages in between pass it on
    has_gradient: bool  # whether its gradient is sent back; zeros if the tape returns None
    bytes: int  # per row
    kind: str  # "value", "mask" or "logits"
    tensor: int  # index in `Graph.tensors`; for a mask or logits, of the tensor to which they are attached


# The tensors that a stage receives from the previous one, in the same order for both, and the tensors that get their masks.
Boundary: TypeAlias = tuple[tuple[Crossing, ...], frozenset[int]]


def boundaries(run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[Boundary]:
    """Returns the boundary before each stage, and after the last one; the first and the last are empty.

    A mask that a later call uses is sent with its tensor, once if several tensors share it. An output is sent with its
    logits, because Keras's losses use them. Inputs of the model are not sent: every stage has them. `stage_of` has the stage
    of each call of `graph.calls`.
    """
    graph, last_use = run.graph, last_uses(run.graph, dict(enumerate(stage_of)), stages - 1)
    calls = zip(graph.calls, stage_of, strict=True)
    sources = {x: stage for call, stage in calls for x in call.outputs if x in last_use}
    masked = _masked_tensors(run, stage_of, stages)
    results: list[Boundary] = [((), frozenset())]
    for stage in range(1, stages):
        tensors = sorted(tensor for tensor, origin in sources.items() if origin < stage <= last_use[tensor])
        masked_tensors = [tensor for tensor in tensors if any(tensor in later for later in masked[stage:])]
        carriers = {run.masks[tensor]: tensor for tensor in reversed(masked_tensors)}
        outputs = [tensor for tensor in tensors if tensor in run.logits and tensor in graph.outputs]
        kinds = ((VALUE, tensors), (MASK, sorted(carriers.values())), (LOGITS, outputs))
        crossings = [_make_crossing(run, x, sources[x], kind) for kind, indices in kinds for x in indices]
        results.append((tuple(crossings), frozenset(masked[stage].intersection(tensors))))
    return [*results, results[0]]


def _masked_tensors(run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[set[int]]:
    """Returns, for each stage, the tensors that have a mask at their first use."""
    first_uses: list[dict[int, bool]] = [{} for _ in range(stages)]
    for call, tensors_with_mask, stage in zip(run.graph.calls, run.masked_call_inputs, stage_of, strict=True):
        for tensor in call.inputs:
            first_uses[stage].setdefault(tensor, tensor in tensors_with_mask)
    for tensor in run.graph.outputs:
        first_uses[-1].setdefault(tensor, tensor in run.masked_outputs)
    return [{tensor for tensor, is_masked in uses.items() if is_masked and tensor in run.masks} for uses in first_uses]


def _make_crossing(run: AbstractRun, index: int, stage: int, kind: str) -> Crossing:
    tensor = run.graph.tensors[index]
    if kind == MASK:
        shape, dtype = run.mask_shapes[index]
        size = math.prod(n or 1 for n in shape) * tf.as_dtype(dtype).size
        return Crossing(f"{tensor.name}/mask", shape, dtype, stage, False, size, kind, index)
    name = f"{tensor.name}/logits" if kind == LOGITS else tensor.name
    shape = run.static_shapes[index]
    return Crossing(name, shape, tensor.dtype, stage, index in run.differentiable, run.sizes[index], kind, index)
