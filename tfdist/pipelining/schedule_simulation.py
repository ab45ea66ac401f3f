"""Predicts the timeline of a schedule, detects deadlocks, and validates schedules."""

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
    """Predicts the times of all actions; messages take no time.

    Durations are in seconds, one number for all stages or one per stage.

    Args:
      schedule: the schedule.
      forward: duration of a forward pass.
      backward: duration of a backward pass, "B".
      weight: duration of the gradient of the weights, "W"; half of `backward` by default.
      input_gradient: duration of the gradient of the input, "I"; by default the difference of `backward` and `weight`, as if
        splitting the backward pass were free.

    Raises:
      InputError: actions wait for each other; the message names the cycle.
    """
    backward_by_stage = _by_stage(backward, schedule)
    weights = [seconds / 2 for seconds in backward_by_stage] if weight is None else _by_stage(weight, schedule)
    input_seconds = [max(total - w, 0.0) for total, w in zip(backward_by_stage, weights, strict=True)]
    durations = {
        FORWARD: _by_stage(forward, schedule),
        BACKWARD: backward_by_stage,
        WEIGHT_GRADIENT: weights,
        INPUT_GRADIENT: input_seconds if input_gradient is None else _by_stage(input_gradient, schedule),
    }
    return Timeline(_spans(schedule, durations))


def _by_stage(durations: Durations, schedule: Schedule) -> Sequence[float]:
    return durations if isinstance(durations, Sequence) else [durations] * schedule.stages


def _spans(schedule: Schedule, durations: Mapping[str, Sequence[float]]) -> tuple[tuple[Span, ...], ...]:
    """Starts each action when its process is free and the results that it needs are available.

    Args:
      schedule: the schedule.
      durations: seconds by kind of action and stage.
    """
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ends: dict[Action, float] = {}

    def missing_requirement(process: int) -> Action | None:
        """Returns a result that the next action of a process needs and that is not available yet."""
        action = schedule.actions[process][len(spans[process])]
        return next((requirement for requirement in schedule.requirements(action) if requirement not in ends), None)

    def compute(process: int) -> None:
        action = schedule.actions[process][len(spans[process])]
        free_time = spans[process][-1].end if spans[process] else 0.0
        start = max([free_time, *(ends[requirement] for requirement in schedule.requirements(action))])
        spans[process].append(Span(action, start, start + durations[action.kind][action.stage]))
        ends[result_of(action)] = spans[process][-1].end

    has_progress = True
    while has_progress:
        has_progress = False
        for process, row in enumerate(schedule.actions):
            while len(spans[process]) < len(row) and missing_requirement(process) is None:
                compute(process)
                has_progress = True
    waiting = {}
    for process, row in enumerate(schedule.actions):
        if len(spans[process]) < len(row) and (requirement := missing_requirement(process)):
            clause = f"before {row[len(spans[process])]} for {requirement} of process"
            waiting[process] = clause, schedule.process_of(requirement.stage)
    if waiting:
        raise _deadlock_error(waiting)
    return tuple(map(tuple, spans))


def _deadlock_error(waiting: Mapping[int, tuple[str, int]]) -> InputError:
    """Returns the error for waiting processes: by process, a clause and the process for which it waits."""
    process, visited = next(iter(waiting)), list[int]()
    while process in waiting and process not in visited:
        visited.append(process)
        process = waiting[process][1]
    cycle = visited[visited.index(process) :] if process in visited else visited
    clauses = ", ".join(f"process {number} waits {waiting[number][0]} {waiting[number][1]}" for number in cycle)
    return InputError(
        f"Processes of a pipeline must not wait for each other in a cycle. Received: {clauses}. Each action must come after "
        "those whose results it needs."
    )


_SINGLE_BACKWARD, _SPLIT_BACKWARD = {FORWARD, BACKWARD}, {FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}


def check_schedule(schedule: Schedule) -> Schedule:
    """Returns the schedule if it computes a batch.

    Every stage must be in its process and compute F, and either B or both I and W, once for each micro-batch, and actions
    must not wait for each other.

    Raises:
      InputError: the schedule violates a rule; the message names the action.
    """
    _check_places(schedule)
    _check_counts(schedule)
    simulate(schedule, forward=1.0, backward=2.0)  # raises an error that names a cycle
    return schedule


def _check_places(schedule: Schedule) -> None:
    rows, processes, stages = len(schedule.actions), schedule.processes, schedule.stages
    if rows != processes:
        raise _error(
            schedule, f"have actions for {processes} processes, the stages of the mesh", rows, "Write a line for each"
        )
    if stages % processes:
        raise _error(
            schedule,
            f"have a number of stages that is divisible by the {processes} processes",
            stages,
            "Give every process the same number of stages",
        )
    for process, row in enumerate(schedule.actions):
        for action in row:
            if schedule.process_of(action.stage) != process:
                raise _error(
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
            raise _error(schedule, rule, action, "Change --micro_batches, or the schedule")
        if count > 1:
            raise _error(schedule, "compute each action once", f"{action} {count} times", "Leave out the duplicates")
    kinds = defaultdict[tuple[int, int], set[str]](set)
    for action in counts:
        kinds[action.stage, action.micro_batch].add(action.kind)
    for stage, micro_batch in itertools.product(range(stages), range(micro_batches)):
        stage_kinds = kinds.get((stage, micro_batch), set())
        if stage_kinds not in (_SINGLE_BACKWARD, _SPLIT_BACKWARD):
            raise _error(
                schedule,
                f"compute F, and either B or both I and W, of micro-batch {micro_batch} in stage {stage}",
                " ".join(sorted(stage_kinds)) or "none",
                "Add or remove actions, or change --micro_batches",
            )


def _error(schedule: Schedule, rule: str, received: object, remedy: str) -> InputError:
    return InputError(f"The schedule {schedule.name} must {rule}. Received: {received}. {remedy}.")
