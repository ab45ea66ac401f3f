"""Tensors that cross from a stage to the next."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.pipelining.cut.abstract_run import AbstractRun
from tfdist.pipelining.cut.graph import Graph
from tfdist.pipelining.cut.places import last_uses

VALUE, MASK, LOGITS = "value", "mask", "logits"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that one stage sends to the next.

    Attributes:
      name: name of the tensor, followed by "/mask" for a Keras mask and "/logits" for the logits of an output.
      shape: static shape; None for the number of rows, and for other unknown sizes.
      dtype: element type.
      stage: stage that makes it; the stages after it pass it on.
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
    """What crosses from the stage before to a stage.

    Attributes:
      crossings: tensors, in the same order for sender and receiver.
      masked: tensors to which the receiver attaches their masks.
    """

    crossings: tuple[Crossing, ...] = ()
    masked: frozenset[int] = frozenset()


def boundaries(graph: Graph, run: AbstractRun, stage_of: Sequence[int], stages: int) -> list[Boundary]:
    """Returns what each stage gets from the one before; nothing for the first.

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
    producer = graph.producers()
    first = {tensor: stage_of[producer[tensor]] for tensor in last if tensor in producer}
    masked = _masked(graph, run, stage_of, stages)
    found = [Boundary()]
    for stage in range(1, stages):
        tensors = sorted(tensor for tensor, origin in first.items() if origin < stage <= last[tensor])
        later = [tensor for tensor in tensors if any(tensor in masked[after] for after in range(stage, stages))]
        carriers = {run.masks[tensor]: tensor for tensor in reversed(later)}
        outputs = [tensor for tensor in tensors if tensor in run.logits and tensor in graph.outputs]
        kinds = ((VALUE, tensors), (MASK, sorted(carriers.values())), (LOGITS, outputs))
        crossing = (_crossing(graph, run, tensor, first[tensor], kind) for kind, some in kinds for tensor in some)
        found.append(Boundary(tuple(crossing), frozenset(masked[stage].intersection(tensors))))
    return found


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
