"""An order of messages in which no process waits forever, even if each send waits until its message is received.

If each process receives what an action needs just before it, and sends the results just after it, 1F1B deadlocks: process 0
sends the activations of micro-batch 1 while process 1 sends the gradients of micro-batch 0, and neither receives.

Therefore messages are ordered as they would be ready if sends did not wait, F took 1, and B took 2: a timeline that is the same
in all processes. A process starts a message at its time in this order, between the action that ends before and the one that
starts after. The messages between two actions of a process are one `Exchange`: they are started together, and the next action
begins when all have ended. In 1F1B this fuses activations with the gradients that cross them, as Megatron-LM's
`send_forward_recv_backward` does.

It cannot deadlock, however long actions and messages really take. Of all actions and messages that have not ended, consider the
first in the order of that timeline. All that comes before it has ended, in each of its processes; so it is started there, and
ends. By induction all end.

With equal stages and free messages, sends that wait cost nothing with GPipe, 1F1B and ZB-H1. Interleaved schedules of at most
8 processes and 4 S micro-batches take up to 1.44 times as long as with eager sends (simulated on 2026-11-26), because a process
waits until its neighbor has computed, while it could compute itself.
"""

import bisect
import dataclasses

from tfdist.pipelining.schedules.eager_simulation import run_eagerly
from tfdist.pipelining.schedules.schedule import BACKWARD, Action, Message, Schedule


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Messages of one process that are started together, and have all ended before the process continues.

    Attributes:
      messages: what this process sends or receives; at least one.
    """

    messages: tuple[Message, ...]


Step = Action | Exchange
Program = tuple[Step, ...]


def exchanges(schedule: Schedule) -> tuple[Program, ...]:
    """Returns the steps of each process, with an order of messages that cannot deadlock.

    Raises:
      InputError: the actions themselves wait for each other; the message names the cycle.
    """
    timeline = run_eagerly(schedule, lambda action: 2.0 if action.kind == BACKWARD else 1.0, lambda message: 0.0)
    starts = [[span.start for span in row] for row in timeline]
    gaps: list[list[list[Message]]] = [[[] for _ in range(len(row) + 1)] for row in timeline]
    for row in timeline:
        for span in row:
            if message := schedule.messages_of(span.action).send:
                for process in (message.source, message.target):
                    gaps[process][bisect.bisect_left(starts[process], span.end)].append(message)
    return tuple(_program(row, between) for row, between in zip(schedule.actions, gaps, strict=True))


def _program(actions: tuple[Action, ...], gaps: list[list[Message]]) -> Program:
    """Returns the steps of a process from its actions and the messages before each, and after the last."""
    steps: list[Step] = []
    for place, messages in enumerate(gaps):
        steps += [Exchange(tuple(messages))] if messages else []
        steps += actions[place : place + 1]
    return tuple(steps)
