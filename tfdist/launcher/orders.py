"""What is said between a launcher and whoever decides: orders, and reports."""

import enum
import time
from typing import NamedTuple

from tfdist.coordination.messages import BadMessage, Message, take
from tfdist.launcher.outcome import Outcome


class Kind(enum.StrEnum):
    """What a launcher is to do."""

    WAIT = "wait"
    RUN = "run"
    STOP = "stop"
    OVER = "over"


class Order(NamedTuple):
    """What a launcher is to do now; it holds until another one comes.

    Attributes:
      kind: wait; run an attempt, unless that has been done; stop it, so that it saves; or end, as the job is over.
      attempt: its number, 0 for the first.
      node: this launcher's number in it.
      nodes: how many launchers run it.
      processes: how many this launcher starts.
      address: `host:port` where its launchers meet; empty where there is one.
      token: what they show there.
      outcome: why it is to stop, or how the job ended.
      launched: when the job was started first, the same in all attempts.
    """

    kind: Kind
    attempt: int = 0
    node: int = 0
    nodes: int = 1
    processes: int = 0
    address: str = ""
    token: str = ""
    outcome: Outcome = Outcome(0)
    launched: str = ""


class Report(NamedTuple):
    """How an attempt ended, as one of its launchers saw it.

    Attributes:
      outcome: of it.
      stopped: whether somebody wanted this launcher to end.
      dead: how many of its processes ended by a failure of their own.
      step: the last that any of its ranks has noted; None if none has.
      final: whether one of them has noted that nothing must be started again.
      absent: the ranks that did not come to the ranks' group in time, if this launcher serves it.
    """

    outcome: Outcome
    stopped: bool = False
    dead: int = 0
    step: int | None = None
    final: bool = False
    absent: tuple[int, ...] = ()


def launched_now() -> str:
    """What tells a job that begins now from others."""
    return time.strftime("%Y%m%d-%H%M%S")


def order_message(order: Order) -> Message:
    """An order on the wire."""
    return {"type": "order"} | order._asdict() | {"outcome": _outcome_message(order.outcome)}


def order_of(message: Message) -> Order:
    """The order of a message; raises `BadMessage`."""
    kinds = {"kind": str, "attempt": int, "node": int, "nodes": int, "processes": int, "address": str, "token": str}
    kind, *numbers = take(message, **kinds)
    if kind not in list(Kind):
        raise BadMessage(f"an order to {kind!r:.80}")
    outcome, launched = take(message, outcome=list, launched=str)
    return Order(Kind(kind), *numbers)._replace(outcome=_outcome_of(outcome), launched=launched)


def report_message(report: Report) -> Message:
    """A report on the wire."""
    return {"type": "report"} | report._asdict() | {"outcome": _outcome_message(report.outcome)}


def report_of(message: Message) -> Report:
    """The report of a message; raises `BadMessage`."""
    outcome, *rest = take(message, outcome=list, stopped=bool, dead=int, step=(int, type(None)), final=bool)
    [absent] = take(message, absent=list)
    if not all(isinstance(rank, int) for rank in absent):
        raise BadMessage(f"absent ranks that are {absent!r:.80}")
    return Report(_outcome_of(outcome), *rest)._replace(absent=tuple(absent))


def _outcome_message(outcome: Outcome) -> list[object]:
    """Logs stay where they are."""
    return [int(outcome.code), outcome.reason, outcome.rank]


def _outcome_of(fields: list[object]) -> Outcome:
    code, reason, rank = fields if len(fields) == 3 else (None, None, None)
    if not isinstance(code, int) or not isinstance(reason, str) or not isinstance(rank, int | None):
        raise BadMessage(f"an outcome that is {fields!r:.80}")
    return Outcome(code, reason, rank)
