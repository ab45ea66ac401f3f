"""Checks of a schedule: that every micro-batch is computed once, and in an order that can be executed."""

import itertools
from collections import Counter, defaultdict

from tfdist.errors import InputError
from tfdist.pipelining.schedules.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule
from tfdist.pipelining.schedules.simulation import simulate

_WHOLE, _IN_PARTS = {FORWARD, BACKWARD}, {FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}


def check_schedule(schedule: Schedule) -> Schedule:
    """Returns the schedule if it computes a batch.

    Every stage is in its process; computes F, and either B or both I and W, once with each micro-batch; and no actions wait for
    each other. Then `communication.exchanges` is an order of messages that cannot deadlock.

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
