"""The schedules that `--pipeline_schedule` names: one function each, from S processes and M micro-batches to a `Schedule`.

All compute the gradients of a stage in the order of micro-batches, so that their sums are equal bit for bit. The share of
idle time, the bubble, is given for equal stages and without messages; F, B, I and W are the durations of the actions.
"""

from collections.abc import Sequence

from tfdist.errors import InputError
from tfdist.pipelining.schedules.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
)


def gpipe(processes: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes.

        time = (M + S - 1)(F + B),  bubble = (S - 1) / (M + S - 1),  live activations = M

    Huang et al., GPipe, arXiv:1811.06965.
    """
    rows = [
        [Action(kind, process, m) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)]
        for process in range(processes)
    ]
    return _schedule("gpipe", rows, processes, micro_batches)


def one_f_one_b(processes: int, micro_batches: int) -> Schedule:
    """1F1B: process s computes min(S - 1 - s, M) forward passes, then one forward and one backward pass in turn.

        time = (M + S - 1)(F + B),  bubble = (S - 1) / (M + S - 1),  live activations = min(S - s, M)

    The order is that of PipeDream (Harlap et al., arXiv:1806.03377), with a flush after each batch, so that all
    micro-batches use the same weights (Narayanan et al., arXiv:2104.04473, section 2.2.1).
    """
    rows = []
    for process in range(processes):
        forward = [Action(FORWARD, process, m) for m in range(micro_batches)]
        backward = [Action(BACKWARD, process, m) for m in range(micro_batches)]
        rows.append(_alternate(forward, backward, warmup=processes - 1 - process))
    return _schedule("1f1b", rows, processes, micro_batches)


def interleaved(processes: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with C chunks of the model in each process: chunk c of process s is stage c * S + s.

    S micro-batches pass through a chunk before the process turns to its next chunk. Process s computes
    2 (S - 1 - s) + (C - 1) S forward passes first. With F and B of all chunks of a process together,

        time = M (F + B) + (S - 1)(F + B) / C,  bubble / (1 - bubble) = (S - 1) / (C M)

    at C times the messages. Narayanan et al., arXiv:2104.04473, section 2.2.2.

    Raises:
      InputError: M is not divisible by S.
    """
    if micro_batches % processes:
        below = micro_batches - micro_batches % processes
        nearest = [str(count) for count in (below, below + processes) if count]
        raise InputError(
            f"The interleaved schedule needs a number of micro-batches that is divisible by the {processes} stages of the "
            f"mesh. Received: {micro_batches}. Use {' or '.join(nearest)}, or the schedule 1f1b."
        )
    rows = []
    for process in range(processes):
        order = [
            (chunk, first + within)
            for first in range(0, micro_batches, processes)
            for chunk in range(chunks)
            for within in range(processes)
        ]
        forward = [Action(FORWARD, chunk * processes + process, m) for chunk, m in order]
        backward = [Action(BACKWARD, (chunks - 1 - chunk) * processes + process, m) for chunk, m in order]
        rows.append(_alternate(forward, backward, warmup=2 * (processes - 1 - process) + (chunks - 1) * processes))
    return _schedule(f"interleaved(chunks={chunks})", rows, processes, micro_batches)


def zb_h1(processes: int, micro_batches: int) -> Schedule:
    """Zero-bubble H1: 1F1B with the backward pass in two parts, of which the gradient of the weights fills the bubble.

    Process s computes the gradient of the weights s micro-batches after that of the input, on which the previous stage
    waits; so no process keeps more than the S micro-batches that process 0 keeps in 1F1B. With W <= min(F, I) and M >= S,

        time = M (F + I + W) + (S - 1)(F + I - W),  live activations = S

    If F = I = W, this is a third of the bubble of 1F1B. Qi et al., arXiv:2401.10241, section 2.
    """
    rows = []
    for process in range(processes):
        forward = [Action(FORWARD, process, m) for m in range(micro_batches)]
        inputs = [Action(INPUT_GRADIENT, process, m) for m in range(micro_batches)]
        weights = [Action(WEIGHT_GRADIENT, process, m) for m in range(micro_batches)]
        warmup = processes - 1 - process
        row = forward[:warmup]
        for m in range(micro_batches):
            row += [*forward[warmup + m : warmup + m + 1], inputs[m]]
            row += weights[m - process : m - process + 1] if m >= process else []
        rows.append(row + weights[max(micro_batches - process, 0) :])
    return _schedule("zb_h1", rows, processes, micro_batches)


def _alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """Returns some forward passes, then one forward and one backward pass in turn, then the rest of the backward passes."""
    row = list(forward[:warmup])
    for one_forward, one_backward in zip(forward[warmup:], backward, strict=False):
        row += [one_forward, one_backward]
    return row + list(backward[max(len(forward) - warmup, 0) :])


def _schedule(name: str, rows: Sequence[Sequence[Action]], processes: int, micro_batches: int) -> Schedule:
    stages = 1 + max(action.stage for row in rows for action in row)
    return Schedule(name, processes, stages, micro_batches, tuple(map(tuple, rows)))
