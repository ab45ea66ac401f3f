"""The times of a schedule's actions if a process continues at once after a send."""

from collections.abc import Callable

from tfdist.pipelining.schedules.deadlock import deadlock
from tfdist.pipelining.schedules.schedule import Action, Message, Schedule, result_of
from tfdist.pipelining.schedules.timeline import Span


def run_eagerly(
    schedule: Schedule, computing: Callable[[Action], float], travelling: Callable[[Message], float]
) -> tuple[tuple[Span, ...], ...]:
    """Returns the times of all actions, each as soon as its process is free and its messages have arrived.

    Args:
      schedule: the schedule.
      computing: returns the duration of an action.
      travelling: returns the duration of a message.

    Raises:
      InputError: actions wait for each other; the message names the cycle.
    """
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    done: dict[Action, float] = {}

    def missing(process: int) -> Action | None:
        """Returns a result that the next action of a process needs, and that is not there yet."""
        action = schedule.actions[process][len(spans[process])]
        return next((need for need in schedule.requirements(action) if need not in done), None)

    def compute(process: int) -> None:
        action = schedule.actions[process][len(spans[process])]
        start = spans[process][-1].end if spans[process] else 0.0
        received = schedule.messages_of(action).receive
        if received:
            (sent,) = [need for need in schedule.requirements(action) if need.stage == received.stage]
            start = max(start, done[sent] + travelling(received))
        spans[process].append(Span(action, start, start + computing(action)))
        done[result_of(action)] = spans[process][-1].end

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
        raise deadlock(waiting)
    return tuple(map(tuple, spans))
