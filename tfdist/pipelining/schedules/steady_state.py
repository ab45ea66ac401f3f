"""A pipeline without a flush in the midst of training, which the actions of one step do not show."""

import dataclasses

from tfdist.pipelining.schedules.orders import one_f_one_b
from tfdist.pipelining.schedules.schedule import Schedule
from tfdist.pipelining.schedules.timeline import Timeline


def steps_until_steady(schedule: Schedule) -> int:
    """Returns a number of steps of `schedule` after which all stages have been in the midst of training for one of them."""
    return 3 - (1 - schedule.processes) // schedule.micro_batches


def without_end(schedule: Schedule, steps: int) -> Schedule:
    """Returns the order of a pipeline without a flush from its first forward pass to the end of a number of its steps.

    Process s begins with S - 1 - s forward passes, and then computes a forward and a backward pass in turn. Micro-batches of
    later steps have larger numbers.
    """
    processes, count = schedule.processes, steps * schedule.micro_batches
    whole = one_f_one_b(processes, count + processes - 1)
    rows = tuple(row[: processes - 1 - process + 2 * count] for process, row in enumerate(whole.actions))
    return dataclasses.replace(whole, name=schedule.name, actions=rows)


def steady_state(timeline: Timeline, micro_batches: int) -> Timeline:
    """Returns as much of a timeline as a step takes, from when all processes are in the midst of training.

    Args:
      timeline: timeline of `steps_until_steady` steps without a flush; forward passes before the first step may be missing.
      micro_batches: number of micro-batches of a step.
    """
    of_step = 2 * micro_batches
    first = timeline.spans[0]
    seconds = first[-1].end - first[-1 - of_step].end
    start = min(row[-1].end for row in timeline.spans) - seconds
    return timeline.between(start, start + seconds)
