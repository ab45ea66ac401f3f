"""Predicts the timeline of a schedule."""

from collections.abc import Mapping, Sequence

from tfdist.pipelining.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Schedule, result_of
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

    Durations are in seconds, one number for all stages or one per stage. That of the gradient of the weights is half of
    `backward` by default, and that of the gradient of the input the rest, as if splitting the backward pass were free.
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
    """Starts each action when its process is free and the results that it needs are available."""
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ends: dict[Action, float] = {}

    def start_next(process: int) -> bool:
        """Starts the next action of a process if its results are available; returns whether it did."""
        if len(spans[process]) == len(schedule.actions[process]):
            return False
        action = schedule.actions[process][len(spans[process])]
        requirements = schedule.requirements(action)
        if not ends.keys() >= set(requirements):
            return False
        free_time = spans[process][-1].end if spans[process] else 0.0
        start = max([free_time, *(ends[requirement] for requirement in requirements)])
        spans[process].append(Span(action, start, start + durations[action.kind][action.stage]))
        ends[result_of(action)] = spans[process][-1].end
        return True

    while any([start_next(process) for process in range(schedule.processes)]):
        pass
    return tuple(map(tuple, spans))
