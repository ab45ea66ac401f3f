"""Sources of a launcher's orders: a job controller in the same process, or a fixed description of the job."""

import abc
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from tfdist.coordination import Group, LocalGroup
from tfdist.coordination.group import LAUNCHER
from tfdist.coordination.job_token import LOOPBACK
from tfdist.coordination.join import RemoteGroup, wait_for_members
from tfdist.coordination.messages import derived
from tfdist.launcher import node_group
from tfdist.launcher.hosts import LOOPBACK_NAMES, own_names
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.orders import Order, OrderKind, Report, launched_now
from tfdist.launcher.placement import own_host

OWN = "this launcher"  # name of the first launcher


class OrderSource(abc.ABC):
    """The source of a launcher's orders.

    Attributes:
      host: address at which the job's other launchers reach this host.
      all_launchers: the group of all launchers of the job if their number is fixed, else of this one only.
    """

    host: str = LOOPBACK
    all_launchers: Group

    @abc.abstractmethod
    def order(self) -> Order:
        """Returns the current order for this launcher; polled."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Reports how the ordered attempt ended."""

    @abc.abstractmethod
    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        """Returns a context with the group of the attempt's launchers."""

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """Requests the end of this launcher between two attempts, without waiting for other hosts if `at_once`."""

    def conclude(self, outcome: Outcome) -> Outcome:
        """Returns how the job ended, after all launchers have ended."""
        return outcome


class LocalController(OrderSource):
    """Orders of a job controller in the same process: that of the first, and often only, launcher of a job.

    Args:
      job: the job to run.
      controller: a controller without launchers.
      token: the job's token, if other launchers may join.
    """

    def __init__(self, job: Job, controller: JobController, token: str = ""):
        self._job, self._controller, self._token = job, controller, token
        self.host, self.all_launchers = own_host(job.coordinator if job.is_elastic else "", serves=True), LocalGroup()
        controller.add_launcher(OWN, [*LOOPBACK_NAMES, *own_names()])

    def order(self) -> Order:
        """See base class."""
        return self._controller.order(OWN)

    def report(self, report: Report) -> None:
        """See base class."""
        self._controller.record_report(OWN, report)

    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return attempt_group(order, self._token, self._job.start_timeout_seconds)

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """See base class."""
        self._controller.end(outcome, at_once)


class FixedNodes(OrderSource):
    """Orders of one of a fixed number of launchers, each of which runs its processes once; `group` is that of all."""

    def __init__(self, job: Job, group: Group):
        self._job, self.all_launchers = job, group
        self._outcome: Outcome | None = None
        self._launched = launched_now()  # node 0's value is used to name the job's output
        self.host = own_host(job.coordinator, serves=group.rank == 0)

    def order(self) -> Order:
        """See base class."""
        if self._outcome:
            return Order(OrderKind.OVER, outcome=self._outcome)
        return Order(
            OrderKind.RUN, 0, self._job.node_rank, self._job.nodes, self._job.processes, launched=self._launched
        )

    def report(self, report: Report) -> None:
        """See base class."""
        self._outcome = report.outcome

    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return contextlib.nullcontext(self.all_launchers)

    def conclude(self, outcome: Outcome) -> Outcome:
        """See base class."""
        return node_group.conclude(self.all_launchers, outcome, self._job.grace_seconds)


@contextlib.contextmanager
def attempt_group(order: Order, token: str, timeout: float) -> Iterator[Group]:
    """Yields the group of the launchers of an elastic job's attempt, at the address of the order.

    Args:
      order: an order to run.
      token: the job's token.
      timeout: seconds for all launchers to connect.

    Raises:
      PeerLostError: a launcher did not connect.
    """
    if order.nodes == 1:
        yield LocalGroup()
        return
    group = RemoteGroup(
        order.address,
        rank=order.node,
        size=order.nodes,
        token=derived(token, order.purpose),
        timeout=timeout,
        noun="node",
        server_rank=LAUNCHER,
    )
    try:
        yield wait_for_members(group, timeout)
    finally:
        group.leave()
