"""Where a launcher gets its orders: from a director of its own, or as one of a fixed number of launchers."""

import abc
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from tfdist.coordination import Group, LocalGroup
from tfdist.coordination.addresses import LOOPBACK
from tfdist.coordination.client import RemoteGroup
from tfdist.coordination.group import LAUNCHER
from tfdist.coordination.join import started
from tfdist.launcher import nodes
from tfdist.launcher.hosts import LOOPBACK_NAMES, own_names
from tfdist.launcher.job import Job
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.orders import Kind, Order, Report, launched_now
from tfdist.launcher.outcome import Outcome
from tfdist.launcher.placement import own_host

OWN = "this launcher"  # the first of a director's


class OrderSource(abc.ABC):
    """Where a launcher gets its orders.

    Attributes:
      host: how the job's other launchers reach this host.
      everyone: all launchers of the job, where their number is fixed; else this one alone.
    """

    host: str = LOOPBACK
    everyone: Group

    @abc.abstractmethod
    def order(self) -> Order:
        """What this launcher is to do now; asked again and again."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Says how the attempt ended that was ordered."""

    @abc.abstractmethod
    def meet(self, order: Order) -> AbstractContextManager[Group]:
        """The launchers of an attempt."""

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """Says that somebody wants this launcher to end, while nothing runs; or at once, whatever runs elsewhere."""

    def conclude(self, outcome: Outcome) -> Outcome:
        """How the job ended, once all launchers have ended."""
        return outcome


class LocalController(OrderSource):
    """The first launcher of a job, and often the only one: whose director decides."""

    def __init__(self, job: Job, controller: JobController):
        """Args: job: to be run; director: decides; nobody has joined it yet."""
        self._job, self._controller = job, controller
        self.host, self.everyone = own_host(job.coordinator if job.is_elastic else "", serves=True), LocalGroup()
        controller.joined(OWN, [*LOOPBACK_NAMES, *own_names()])

    def order(self) -> Order:
        """See base class."""
        return self._controller.order(OWN)

    def report(self, report: Report) -> None:
        """See base class."""
        self._controller.reported(OWN, report)

    def meet(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return meeting(order, self._job.start_timeout_seconds)

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """See base class."""
        self._controller.end(outcome, at_once)


class FixedNodes(OrderSource):
    """One of a fixed number of launchers, each of which runs its processes once."""

    def __init__(self, job: Job, group: Group):
        """Args: job: of all; group: of all launchers."""
        self._job, self.everyone = job, group
        self._ended: Outcome | None = None
        self._launched = launched_now()  # node 0's names what the job writes
        self.host = own_host(job.coordinator, serves=group.rank == 0)

    def order(self) -> Order:
        """See base class."""
        if self._ended:
            return Order(Kind.OVER, outcome=self._ended)
        return Order(Kind.RUN, 0, self._job.node_rank, self._job.nodes, self._job.processes, launched=self._launched)

    def report(self, report: Report) -> None:
        """See base class."""
        self._ended = report.outcome

    def meet(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return contextlib.nullcontext(self.everyone)

    def conclude(self, outcome: Outcome) -> Outcome:
        """See base class."""
        return nodes.conclude(self.everyone, outcome)


@contextlib.contextmanager
def meeting(order: Order, timeout: float) -> Iterator[Group]:
    """The launchers of an attempt of an elastic job, at the place that the order names.

    Args:
      order: to run.
      timeout: in seconds, for all to come.

    Raises:
      PeerLostError: one did not come.
    """
    if order.nodes == 1:
        yield LocalGroup()
        return
    group = RemoteGroup(
        order.address,
        rank=order.node,
        size=order.nodes,
        token=order.token,
        timeout=timeout,
        noun="node",
        server_rank=LAUNCHER,
    )
    try:
        yield started(group, timeout)
    finally:
        group.leave()
