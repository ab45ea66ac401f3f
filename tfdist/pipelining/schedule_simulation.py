"""Predicts the timeline of a schedule, finds deadlocks, and checks that it can be executed."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from tfdist.errors import InputError
from tfdist.pipelining.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
    result_of,
)
from tfdist.pipelining.timeline import Span, Timeline

Durations = float | Sequence[float]


def simulate(
    schedule: Schedule,
    *,
    forward: Durations,
    backward: Durations,
    weight: Durations | None = None,
    input_gradient: Durations | None = None,
) -> Timeline:
    """Predicts when each process computes which action; messages take no time.

    Durations are in seconds, one for all stages or one for each.

    Args:
      schedule: the schedule.
      forward: duration of a forward pass.
      backward: duration of a backward pass, "B".
      weight: of this, the gradient of the weights, "W"; half of it by default.
      input_gradient: duration of the gradient of the input, "I"; the rest of `backward` by default, which assumes that a
        backward pass in two parts costs no more than one in one part.

    Raises:
      InputError: actions wait for each other; the message names the cycle.
    """
    backward_by_stage = _by_stage(backward, schedule)
    weights = [seconds / 2 for seconds in backward_by_stage] if weight is None else _by_stage(weight, schedule)
    rest = [max(both - w, 0.0) for both, w in zip(backward_by_stage, weights, strict=True)]
    durations = {
        FORWARD: _by_stage(forward, schedule),
        BACKWARD: backward_by_stage,
        WEIGHT_GRADIENT: weights,
        INPUT_GRADIENT: rest if input_gradient is None else _by_stage(input_gradient, schedule),
    }
    return Timeline(_spans(schedule, durations))


def _by_stage(durations: Durations, schedule: Schedule) -> Sequence[float]:
    return durations if isinstance(durations, Sequence) else [durations] * schedule.stages


def _spans(schedule: Schedule, durations: Mapping[str, Sequence[float]]) -> tuple[tuple[Span, ...], ...]:
    """Returns the times of all actions, each as soon as its process is free and the results that it needs are available.

    Args:
      schedule: the schedule.
      durations: seconds by kind of action and stage.
    """
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ends: dict[Action, float] = {}

    def missing(process: int) -> Action | None:
        """Returns a result that the next action of a process needs, and that is not available yet."""
        action = schedule.actions[process][len(spans[process])]
        return next((need for need in schedule.requirements(action) if need not in ends), None)

    def compute(process: int) -> None:
        action = schedule.actions[process][len(spans[process])]
        free = spans[process][-1].end if spans[process] else 0.0
        start = max([free, *(ends[need] for need in schedule.requirements(action))])
        spans[process].append(Span(action, start, start + durations[action.kind][action.stage]))
        ends[result_of(action)] = spans[process][-1].end

    running = True
    while running:
        running = False
        for process, row in enumerate(schedule.actions):
            while len(spans[process]) < len(row) and missing(process) is None:
                compute(process)
                running = True
    waiting = {}
    for process, row in enumerate(schedule.actions):
        if len(spans[process]) < len(row) and (need := missing(process)):
            clause = f"before {row[len(spans[process])]} for {need} of process"
            waiting[process] = clause, schedule.process_of(need.stage)
    if waiting:
        raise _deadlock(waiting)
    return tuple(map(tuple, spans))


def _deadlock(waiting: Mapping[int, tuple[str, int]]) -> InputError:
    """Returns the error.

    Args:
      waiting: for each process that waits, the clause of the message, and the number of the process for which it waits.
    """
    process, seen = next(iter(waiting)), list[int]()
    while process in waiting and process not in seen:
        seen.append(process)
        process = waiting[process][1]
    cycle = seen[seen.index(process) :] if process in seen else seen
    clauses = ", ".join(f"process {one} waits {waiting[one][0]} {waiting[one][1]}" for one in cycle)
    return InputError(
        f"Processes of a pipeline must not wait for each other in a cycle. Received: {clauses}. Each action must come after "
        "those whose results it needs."
    )


_WHOLE, _IN_PARTS = {FORWARD, BACKWARD}, {FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}


def check_schedule(schedule: Schedule) -> Schedule:
    """Returns the schedule if it computes a batch.

    Every stage is in its process; computes F, and either B or both I and W, once with each micro-batch; and no actions wait for
    each other.

    Raises:
      InputError: it does not; the message names the action.
    """
    _check_places(schedule)
    _check_counts(schedule)
    simulate(schedule, forward=1.0, backward=2.0)  # raises an error that names a cycle
    return schedule


def _check_places(schedule: Schedule) -> None:
    rows, processes, stages = len(schedule.actions), schedule.processes, schedule.stages
    if rows != processes:
        raise _wrong(
            schedule, f"have actions for {processes} processes, the stages of the mesh", rows, "Write a line for each"
        )
    if stages % processes:
        raise _wrong(
            schedule,
            f"have a number of stages that is divisible by the {processes} processes",
            stages,
            "Give every process the same number of stages",
        )
    for process, row in enumerate(schedule.actions):
        for action in row:
            if schedule.process_of(action.stage) != process:
                raise _wrong(
                    schedule,
                    f"have stage {action.stage} in process {schedule.process_of(action.stage)}, as stage v is in process v % "
                    f"{processes}",
                    f"{action} in process {process}",
                    "Number the stages so",
                )


def _check_counts(schedule: Schedule) -> None:
    stages, micro_batches = schedule.stages, schedule.micro_batches
    counts = Counter(action for row in schedule.actions for action in row)
    for action, count in counts.items():
        if not (0 <= action.micro_batch < micro_batches and 0 <= action.stage < stages):
            rule = f"have micro-batches 0 to {micro_batches - 1} of stages 0 to {stages - 1}"
            raise _wrong(schedule, rule, action, "Change --micro_batches, or the schedule")
        if count > 1:
            raise _wrong(schedule, "compute each action once", f"{action} {count} times", "Leave the others out")
    kinds = defaultdict[tuple[int, int], set[str]](set)
    for action in counts:
        kinds[action.stage, action.micro_batch].add(action.kind)
    for stage, micro_batch in itertools.product(range(stages), range(micro_batches)):
        found = kinds.get((stage, micro_batch), set())
        if found not in (_WHOLE, _IN_PARTS):
            raise _wrong(
                schedule,
                f"compute F, and either B or both I and W, of micro-batch {micro_batch} in stage {stage}",
                " ".join(sorted(found)) or "none",
                "Add or remove actions, or change --micro_batches",
            )


def _wrong(schedule: Schedule, rule: str, received: object, remedy: str) -> InputError:
    return InputError(f"The schedule {schedule.name} must {rule}. Received: {received}. {remedy}.")
