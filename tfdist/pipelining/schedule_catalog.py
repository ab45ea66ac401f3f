"""The schedules of `--pipeline_schedule`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.config import pipeline as grammar
from tfdist.errors import InputError, is_integer
from tfdist.pipelining.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Schedule
from tfdist.pipelining.timeline import Timeline

# The functions of this section create a `Schedule` for S processes and M micro-batches. All of them compute the gradients of a
# stage in the order of micro-batches, so their sums are bitwise equal. The bubble is the fraction of idle time if stages are
# equal and messages take no time; F, B, I and W are the durations of the actions.


def gpipe(processes: int, micro_batches: int) -> Schedule:
    """GPipe: all forward passes, then all backward passes.

        time = (M + S - 1)(F + B),  bubble = (S - 1) / (M + S - 1),  live activations = M

    Huang et al., GPipe, arXiv:1811.06965.
    """
    passes = [(kind, m) for kind in (FORWARD, BACKWARD) for m in range(micro_batches)]
    actions = [[Action(kind, process, m) for kind, m in passes] for process in range(processes)]
    return _schedule("gpipe", actions, processes, micro_batches)


def one_f_one_b(processes: int, micro_batches: int) -> Schedule:
    """1F1B: process s computes min(S - 1 - s, M) forward passes, then alternates forward and backward passes.

        time = (M + S - 1)(F + B),  bubble = (S - 1) / (M + S - 1),  live activations = min(S - s, M)

    This is the order of PipeDream (Harlap et al., arXiv:1806.03377) with a flush after each batch, so all micro-batches use
    the same weights (Narayanan et al., arXiv:2104.04473, section 2.2.1).
    """
    actions = []
    for process in range(processes):
        forward = [Action(FORWARD, process, m) for m in range(micro_batches)]
        backward = [Action(BACKWARD, process, m) for m in range(micro_batches)]
        actions.append(_alternate(forward, backward, warmup=processes - 1 - process))
    return _schedule("1f1b", actions, processes, micro_batches)


def interleaved(processes: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with C chunks of the model in each process: chunk c of process s is stage c * S + s.

    S micro-batches pass through a chunk before the process switches to its next chunk. Process s begins with
    2 (S - 1 - s) + (C - 1) S forward passes. With F and B for all chunks of a process together,

        time = M (F + B) + (S - 1)(F + B) / C,  bubble / (1 - bubble) = (S - 1) / (C M)

    with C times the messages. Narayanan et al., arXiv:2104.04473, section 2.2.2. Raises `InputError` unless S divides M.
    """
    if micro_batches % processes:
        lower_multiple = micro_batches - micro_batches % processes
        nearest = [str(count) for count in (lower_multiple, lower_multiple + processes) if count]
        raise InputError(
            f"The interleaved schedule needs a number of micro-batches that is divisible by the {processes} stages of the "
            f"mesh. Received: {micro_batches}. Use {' or '.join(nearest)}, or the schedule 1f1b."
        )
    actions = []
    for process in range(processes):
        order = [
            (chunk, first + offset)
            for first in range(0, micro_batches, processes)
            for chunk in range(chunks)
            for offset in range(processes)
        ]
        forward = [Action(FORWARD, chunk * processes + process, m) for chunk, m in order]
        backward = [Action(BACKWARD, (chunks - 1 - chunk) * processes + process, m) for chunk, m in order]
        actions.append(_alternate(forward, backward, warmup=2 * (processes - 1 - process) + (chunks - 1) * processes))
    return _schedule(f"interleaved(chunks={chunks})", actions, processes, micro_batches)


def zb_h1(processes: int, micro_batches: int) -> Schedule:
    """Zero-bubble H1: 1F1B with a split backward pass, where gradients of weights fill the bubble.

    Process s computes the gradient of the weights s micro-batches after that of the input, for which the previous stage
    waits. No process keeps more than S micro-batches, as process 0 does in 1F1B. With W <= min(F, I) and M >= S,

        time = M (F + I + W) + (S - 1)(F + I - W),  live activations = S

    If F = I = W, this is a third of the bubble of 1F1B. Qi et al., arXiv:2401.10241, section 2.
    """
    actions = []
    for process in range(processes):
        forward = [Action(FORWARD, process, m) for m in range(micro_batches)]
        inputs = [Action(INPUT_GRADIENT, process, m) for m in range(micro_batches)]
        weights = [Action(WEIGHT_GRADIENT, process, m) for m in range(micro_batches)]
        warmup = processes - 1 - process
        order = forward[:warmup]
        for m in range(micro_batches):
            order += [*forward[warmup + m : warmup + m + 1], inputs[m]]
            order += weights[m - process : m - process + 1] if m >= process else []
        actions.append(order + weights[max(micro_batches - process, 0) :])
    return _schedule("zb_h1", actions, processes, micro_batches)


def _alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """Returns `warmup` forward passes, then alternating forward and backward passes, then the remaining backward passes."""
    order = list(forward[:warmup])
    for forward_action, backward_action in zip(forward[warmup:], backward, strict=False):
        order += [forward_action, backward_action]
    return order + list(backward[max(len(forward) - warmup, 0) :])


def _schedule(name: str, actions: Sequence[Sequence[Action]], processes: int, micro_batches: int) -> Schedule:
    stages = 1 + max(action.stage for process_actions in actions for action in process_actions)
    return Schedule(name, processes, stages, micro_batches, tuple(map(tuple, actions)))


# PipeDream and 2BW: 1F1B without a flush.
# Process s of S is S - 1 - s micro-batches ahead with its forward passes, and starts the forward passes of a batch before the
# update of the previous batch. All micro-batches of a batch use the weights that are newest when the first of them starts, so
# the weights of batch t in stage s are
#
#     delay D_s = ceil((S - 1 - s) / M) updates old                            `pipedream`, weight stashing
#
# The backward passes of a batch use the weights of its forward passes, and the update changes the newest weights:
#
#     w_s(t + 1) = update(w_s(t), gradient_s(w_0(t - D_0), w_1(t - D_1), ..., w_{S-1}(t - D_{S-1}))),
#     w_s(v) = w_s(0) for v < 0
#
#     M = 1:  w_s(t + 1) = update(w_s(t), gradient_s(w_0(t - S + 1), w_1(t - S + 2), ..., w_{S-1}(t)))
#
# With vertical sync, all stages use weights of the age of stage 0, D_s = ceil((S - 1) / M). If M >= S - 1, this is
#
#     w(t + 1) = update(w(t), gradient(w(t - 1)))                                      `2bw`
#
# which needs two versions of the weights: 2BW is PipeDream with vertical sync and enough micro-batches.
#
# Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019 (doi:10.1145/3341301.3359646).
# Harlap et al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training, 2018 (arXiv:1806.03377). Narayanan et al.,
# Memory-Efficient Pipeline-Parallel DNN Training, 2021 (arXiv:2006.09503).


def pipedream(processes: int, micro_batches: int, vertical_sync: bool = False) -> Schedule:
    """Returns 1F1B, from an empty to an empty pipeline, with the delays of PipeDream.

        time of a step = M (F + B),  live activations = S - s,  versions of the weights = D_s + 1

    With `vertical_sync`, all stages compute a batch with weights of the same age.
    """
    lead = [processes - 1 if vertical_sync else processes - 1 - stage for stage in range(processes)]
    return dataclasses.replace(
        one_f_one_b(processes, micro_batches),
        name="pipedream(vertical_sync=True)" if vertical_sync else "pipedream",
        delays=tuple(-(-lead_of_stage // micro_batches) for lead_of_stage in lead),
    )


def two_bw(processes: int, micro_batches: int) -> Schedule:
    """Returns 1F1B, from an empty to an empty pipeline, with the delays of 2BW.

        time of a step = M (F + B),  live activations = S - s,  versions of the weights = 2

    Raises `InputError` if M < S - 1.
    """
    if micro_batches < processes - 1:
        raise InputError(
            f"2bw needs at least {processes - 1} micro-batches, one less than the {processes} stages of the mesh, so that two "
            f"versions of the weights suffice. Received: {micro_batches}. Raise --micro_batches, or use pipedream."
        )
    delays = (min(processes - 1, 1),) * processes
    return dataclasses.replace(one_f_one_b(processes, micro_batches), name="2bw", delays=delays)


def steps_until_steady(schedule: Schedule) -> int:
    """Returns a number of steps of `schedule` after which the pipeline has been full for one step."""
    return 3 - (1 - schedule.processes) // schedule.micro_batches


def order_without_flush(schedule: Schedule, steps: int) -> Schedule:
    """Returns the order of a pipeline without a flush, from its first forward pass to the end of `steps` steps.

    Process s begins with S - 1 - s forward passes, then alternates forward and backward passes. Micro-batches are numbered
    consecutively over the steps.
    """
    processes, count = schedule.processes, steps * schedule.micro_batches
    long_schedule = one_f_one_b(processes, count + processes - 1)
    orders = enumerate(long_schedule.actions)
    actions = tuple(order[: processes - 1 - process + 2 * count] for process, order in orders)
    return dataclasses.replace(long_schedule, name=schedule.name, actions=actions)


def steady_state(timeline: Timeline, micro_batches: int) -> Timeline:
    """Returns the part of a timeline for one step, of `micro_batches`, during which the pipeline is full.

    The timeline must have `steps_until_steady` steps without a flush; it need not have the initial forward passes.
    """
    actions_per_step = 2 * micro_batches
    first_spans = timeline.spans[0]  # of process 0
    seconds = first_spans[-1].end - first_spans[-1 - actions_per_step].end
    start = min(spans[-1].end for spans in timeline.spans) - seconds
    return timeline.clip(start, start + seconds)


# Functions of the number of processes, the number of micro-batches, and the parameters in the flag.
_SCHEDULES: Mapping[type[grammar.PipelineSchedule], Callable[..., Schedule]] = {
    grammar.GPipe: gpipe,
    grammar.OneFOneB: one_f_one_b,
    grammar.Interleaved: interleaved,
    grammar.ZBH1: zb_h1,
    grammar.PipeDream: pipedream,
    grammar.TwoBW: two_bw,
}


def make_schedule(spec: str | grammar.PipelineSchedule, processes: int, micro_batches: int) -> Schedule:
    """Creates a schedule from text such as "interleaved(chunks=2)", or from the result of `parse_pipeline_schedule`.

    Raises `InputError` if the spec is unknown, or the schedule does not support these numbers of processes and micro-batches.
    """
    for name, number in (("processes", processes), ("micro_batches", micro_batches)):
        if not is_integer(number) or number < 1:
            raise InputError(f"{name} must be an integer of at least 1. Received: {number!r}. Use 4, for example.")
    kind = grammar.parse_pipeline_schedule(spec) if isinstance(spec, str) else spec
    return _SCHEDULES[type(kind)](processes, micro_batches, **dataclasses.asdict(kind))
