"""Where a model is cut: after named layers, or so that stages cost about the same."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.pipeline import AfterLayers, Balanced
from tfdist.errors import InputError
from tfdist.errors.formatting import nearest
from tfdist.pipelining.operation_graph import AbstractRun, Call, Graph

SLACK = 0.05  # fraction by which the most expensive stage may exceed its minimum, to send fewer bytes


def balance(costs: np.ndarray, stages: int, crossing: np.ndarray, allowed: np.ndarray) -> list[int] | None:
    """Returns where the stages other than the first begin: the indices of the elements before which to cut.

    The highest cost of a stage is at most 5% above the minimum; subject to that, the total of bytes that cross cuts is
    minimal. O(stages * n^2) by dynamic programming.

    Args:
      costs: [n + 1, n + 1]; cost of a stage from element i to before j.
      stages: number of stages.
      crossing: [n + 1]; bytes that cross a cut before each element.
      allowed: [n + 1] bool; whether a cut before each element is allowed.

    Returns:
      stages - 1 ascending indices; None if too few cuts are allowed.
    """
    n = len(costs) - 1
    costs = np.where(np.tri(n + 1, dtype=bool), np.inf, costs)  # no stage is empty
    highest = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    for stage in range(stages):
        highest = np.maximum(highest[:, None], costs).min(axis=0)
        if stage < stages - 1:
            highest = np.where(allowed, highest, np.inf)
    if not np.isfinite(highest[n]):
        return None
    limit = highest[n] * (1 + SLACK)
    sent = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    highest, origins = sent.copy(), []
    for stage in range(stages):
        worst = np.maximum(highest[:, None], costs)
        bytes_so_far = np.where(worst <= limit, sent[:, None], np.inf)
        least = bytes_so_far.min(axis=0)
        origin = np.where(bytes_so_far == least, worst, np.inf).argmin(axis=0)
        origins.append(origin)
        sent, highest = least + crossing, np.where(np.isfinite(least), worst[origin, np.arange(n + 1)], np.inf)
        if stage < stages - 1:
            sent, highest = np.where(allowed, sent, np.inf), np.where(allowed, highest, np.inf)
    starts, end = [], n
    for origin in reversed(origins):
        end = int(origin[end])
        starts.append(end)
    return starts[::-1][1:]


# Maximum bytes that cross a balanced cut, as a multiple of the median over all positions, unless no other cut is possible.
_MAX_RELATIVE_BYTES = 4.0


def cut_positions(
    graph: Graph,
    run: AbstractRun,
    cut: AfterLayers | Balanced,
    stages: int,
    seconds: Callable[[Graph], Sequence[float]],
) -> list[int]:
    """Returns the first position in `graph.order` of each stage except stage 0.

    Args:
      graph: graph of the model.
      run: its abstract run.
      cut: where to cut.
      stages: number of stages.
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
        positions = _after_layers(graph, cut, stages)
        for calls in inseparable:
            if any(calls.first < position <= calls.last for position in positions):
                raise calls.refused(str(cut))
        return positions
    allowed = _allowed(graph)
    for calls in inseparable:
        allowed[calls.first + 1 : calls.last + 1] = False
    crossing = np.array([0.0, *crossing_bytes(graph, run)])
    costs = _costs(graph, run, cut, seconds)
    sensible = allowed & (crossing <= _MAX_RELATIVE_BYTES * (np.median(crossing[allowed]) if allowed.any() else 0.0))
    positions_of_balance = balance(costs, stages, crossing, sensible) or balance(costs, stages, crossing, allowed)
    if positions_of_balance is None:
        any_calls = _Inseparable(_STATE, graph.model.name, 0, 0)
        raise (inseparable[0] if inseparable else any_calls).refused(f"{stages} stages")
    return positions_of_balance


class _Inseparable(NamedTuple):
    """Calls that must be in one stage.

    Attributes:
      rule: the reason, a format string with the fields `received` and `name`.
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
    """Returns whether a cut before each position is allowed: not before the first, nor just after a nested model's entry."""
    ordered = [graph.calls[i] for i in graph.order]
    return np.array([False, *(not call.is_entry for call in ordered[:-1]), False])


def _with_state(graph: Graph, run: AbstractRun) -> list[_Inseparable]:
    """Returns, for each variable that a training step assigns, the calls that use it, if there are several."""
    written = {key for usage in run.usage for key in usage.written}
    users: dict[int, list[int]] = {}
    for position, i in enumerate(graph.order):
        for key in written.intersection(run.usage[i].variables):
            users.setdefault(key, []).append(position)
    several = [positions for positions in users.values() if len(positions) > 1]
    return [_Inseparable(_STATE, graph.calls[graph.order[calls[0]]].name, calls[0], calls[-1]) for calls in several]


def _not_sendable(graph: Graph, run: AbstractRun) -> list[_Inseparable]:
    """Returns, for each tensor that cannot be sent, the calls from the one that computes it to the last one that uses it."""
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
    positions = [_end(ordered, name) for name in cut.names]
    for before, name, position in zip([0, *positions], cut.names, positions, strict=False):
        if position <= before or position == len(ordered):
            earlier = [call.name for call in ordered[: len(ordered) - 1] if not call.is_entry]
            raise InputError(
                f"--cut must name layers in the order of the model, and not its last one. Received: {cut}, with {name} "
                f"out of order. The order is {', '.join(earlier)}."
            )
    return positions


def _end(ordered: Sequence[Call], name: str) -> int:
    """Returns the position after a layer, or after all layers of a nested model, by its name."""
    for pattern in (re.escape(name), rf".*/{re.escape(name)}"):  # a layer of a nested model may be named without it
        matches = [re.fullmatch(rf"({pattern}(?: \(\d+\))?)(?:/.*)?", call.name) for call in ordered]
        called = {match[1] for match in matches if match}
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
    return max(i for i, match in enumerate(matches) if match) + 1


def crossing_bytes(graph: Graph, run: AbstractRun) -> list[int]:
    """Returns the bytes per row that cross a cut after each position of `graph.order`."""
    last = last_uses(graph, {call: position for position, call in enumerate(graph.order)}, len(graph.order) - 1)
    change = [0] * (len(graph.order) + 1)
    for position, i in enumerate(graph.order):
        for tensor in graph.calls[i].outputs:
            end = last.get(tensor, position)
            change[position] += run.sizes[tensor]
            change[end] -= run.sizes[tensor]
    return [int(x) for x in np.cumsum(change[:-1])]


def last_uses(graph: Graph, position_of_call: dict[int, int], end: int) -> dict[int, int]:
    """Returns the last position at which each tensor is used, given those of calls; outputs are used at the end."""
    last = {tensor: end for tensor in graph.outputs}
    for i, call in enumerate(graph.calls):
        for tensor in call.inputs:
            last[tensor] = max(last.get(tensor, 0), position_of_call[i])
    return last


def _costs(graph: Graph, run: AbstractRun, cut: Balanced, seconds: Callable[[Graph], Sequence[float]]) -> np.ndarray:
    """Returns the cost of a stage from position i to before j, [n + 1, n + 1]."""
    if cut.by == "time":
        return _sums(np.array(seconds(graph))[graph.order])
    costs = _variable_bytes(graph, run)
    return costs + _sums([run.usage[i].activations for i in graph.order]) if cut.by == "memory" else costs


def _sums(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns the sums of consecutive values, from i to before j."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, :] - total[:, None]


def _variable_bytes(graph: Graph, run: AbstractRun) -> np.ndarray:
    """Returns the bytes of the variables of a stage from position i to before j; each is counted once."""
    n = len(graph.order)
    variables = [run.usage[i].variables for i in graph.order]
    sizes = np.zeros((n + 1, n + 1))
    for start in range(n):
        counted: set[int] = set()
        total = 0
        for position in range(start, n):
            new = {key: variable for key, variable in variables[position].items() if key not in counted}
            counted.update(new)
            total += sum(keras_internals.bytes_of(variable) for variable in new.values())
            sizes[start, position + 1] = total
    return sizes


VALUE, MASK, LOGITS = "value", "mask", "logits"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that one stage sends to the next.

    Attributes:
      name: name of the tensor, followed by "/mask" for a Keras mask and "/logits" for the logits of an output.
      shape: static shape; None for the number of rows, and for other unknown sizes.
      dtype: element type.
      stage: stage that computes it; the stages after it pass it on.
      has_gradient: whether its gradient must be sent back. It is zero where the tape returns None.
      bytes: bytes per row.
      kind: "value", "mask" or "logits".
      tensor: index in `Graph.tensors` of the tensor, or of the one to which the mask or the logits are attached.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    stage: int
    has_gradient: bool
    bytes: int
    kind: str
    tensor: int


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The tensors that one stage receives from the previous one.

    Attributes:
      crossings: tensors, in the same order for sender and receiver.
      masked: tensors to which the receiver attaches their masks.
    """

    crossings: tuple[Crossing, ...] = ()
    masked: frozenset[int] = frozenset()


def boundaries(graph: Graph, run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[Boundary]:
    """Returns the boundary before each stage; nothing crosses that of the first.

    A mask that a later call sees is sent with its tensor, once if several tensors have the same one. An output with
    attached logits is sent with these, because Keras's losses use them. Inputs of the model do not cross: every stage has
    them.

    Args:
      graph: graph of the model.
      run: its abstract run.
      stage_of: stage of each call of `graph.calls`.
      stages: number of stages.
    """
    last = last_uses(graph, dict(enumerate(stage_of)), stages - 1)
    first = {x: stage for call, stage in zip(graph.calls, stage_of, strict=True) for x in call.outputs if x in last}
    masked = _masked(graph, run, stage_of, stages)
    results = [Boundary()]
    for stage in range(1, stages):
        tensors = sorted(tensor for tensor, origin in first.items() if origin < stage <= last[tensor])
        later = [tensor for tensor in tensors if any(tensor in masked[after] for after in range(stage, stages))]
        carriers = {run.masks[tensor]: tensor for tensor in reversed(later)}
        outputs = [tensor for tensor in tensors if tensor in run.logits and tensor in graph.outputs]
        kinds = ((VALUE, tensors), (MASK, sorted(carriers.values())), (LOGITS, outputs))
        crossing = (_crossing(graph, run, tensor, first[tensor], kind) for kind, some in kinds for tensor in some)
        results.append(Boundary(tuple(crossing), frozenset(masked[stage].intersection(tensors))))
    return results


def _masked(graph: Graph, run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[set[int]]:
    """Returns for each stage the tensors of which its first use sees a mask."""
    first_uses: list[dict[int, bool]] = [{} for _ in range(stages)]
    for call, seen, stage in zip(graph.calls, run.masks_seen, stage_of, strict=True):
        for tensor in call.inputs:
            first_uses[stage].setdefault(tensor, tensor in seen)
    for tensor in graph.outputs:
        first_uses[-1].setdefault(tensor, tensor in run.masks_left)
    return [{tensor for tensor, is_masked in uses.items() if is_masked and tensor in run.masks} for uses in first_uses]


def _crossing(graph: Graph, run: AbstractRun, number: int, stage: int, kind: str) -> Crossing:
    tensor = graph.tensors[number]
    if kind == MASK:
        shape, dtype = run.mask_shapes[number]
        size = math.prod(n or 1 for n in shape) * tf.as_dtype(dtype).size
        return Crossing(f"{tensor.name}/mask", shape, dtype, stage, False, size, kind, number)
    name = f"{tensor.name}/logits" if kind == LOGITS else tensor.name
    shape = run.static_shapes[number]
    return Crossing(name, shape, tensor.dtype, stage, number in run.trained, run.sizes[number], kind, number)
