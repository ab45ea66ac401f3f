"""What is said between a launcher and whoever decides: orders, and reports."""

import enum
from typing import NamedTuple

from tfdist.launching.outcome import Outcome


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
    """

    kind: Kind
    attempt: int = 0
    node: int = 0
    nodes: int = 1
    processes: int = 0
    address: str = ""
    token: str = ""
    outcome: Outcome = Outcome(0)


class Report(NamedTuple):
    """How an attempt ended, as one of its launchers saw it.

    Attributes:
      outcome: of it.
      stopped: whether somebody wanted this launcher to end.
      dead: how many of its processes ended by a failure of their own.
      step: the last that any of its ranks has noted; None if none has.
    """

    outcome: Outcome
    stopped: bool = False
    dead: int = 0
    step: int | None = None
