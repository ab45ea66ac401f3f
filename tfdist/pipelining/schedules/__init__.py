"""Pipeline schedules as data: what each process computes, in which order, and which messages that requires.

    schedule = make_schedule("1f1b", processes=4, micro_batches=8)
    schedule.actions[0]                  (0F0, 0F1, 0F2, 0F3, 0B0, ...): the actions of process 0 in their order
    schedule.messages()                  what each action receives before, and sends after
    simulate(schedule, forward=0.1, backward=0.2).makespan                 3.3

S is the number of processes in a pipeline, s the number of one of them, and M the number of micro-batches. Nothing here
imports TensorFlow; what computes the actions is in `tfdist.pipelining`.
"""

from tfdist.pipelining.schedules.catalog import make_schedule
from tfdist.pipelining.schedules.checks import check_schedule
from tfdist.pipelining.schedules.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    Message,
    Messages,
    Schedule,
)
from tfdist.pipelining.schedules.simulation import simulate
from tfdist.pipelining.schedules.timeline import Span, Timeline

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT_GRADIENT",
    "KINDS",
    "WEIGHT_GRADIENT",
    "Action",
    "Message",
    "Messages",
    "Schedule",
    "Span",
    "Timeline",
    "check_schedule",
    "make_schedule",
    "simulate",
]
