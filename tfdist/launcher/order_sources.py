"""Sources of a launcher's orders: a job controller in the same process, or a fixed number of nodes."""

import abc
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from tfdist.coordination import Group, LocalGroup
from tfdist.coordination.group import LAUNCHER
from tfdist.coordination.job_token import LOOPBACK
from tfdist.coordination.join import RemoteGroup, wait_for_members
from tfdist.coordination.messages import derive_token
from tfdist.launcher import node_group
from tfdist.launcher.hosts import LOOPBACK_NAMES, local_host_names
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.orders import Order, OrderKind, Report, new_job_name
from tfdist.launcher.placement import reachable_address

LOCAL_LAUNCHER = "this launcher"  # name of the first launcher


class OrderSource(abc.ABC):
    """The source of a launcher's orders.

    Attributes:
      host: address at which the other launchers reach this host.
      all_launchers: group of all launchers of the job if their number is fixed, else of this launcher only.
    """

    host: str = LOOPBACK
    all_launchers: Group

    @abc.abstractmethod
    def order(self) -> Order:
        """Returns the current order for this launcher. Must be polled."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Reports the end of the ordered attempt."""

    @abc.abstractmethod
    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        """Returns a context with the group of the attempt's launchers."""

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        """Requests the end of this launcher between attempts; with `is_immediate`, without waiting for other hosts."""

    def conclude(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the job, after all launchers have ended."""
        return outcome


class LocalController(OrderSource):
    """The source of the first launcher's orders: a job controller in the same process."""

    def __init__(self, job: Job, controller: JobController, token: str = ""):
        self._job, self._controller, self._token = job, controller, token
        self.host, self.all_launchers = (
            reachable_address(job.coordinator if job.is_elastic else "", serves=True),
            LocalGroup(),
        )
        controller.add_launcher(LOCAL_LAUNCHER, [*LOOPBACK_NAMES, *local_host_names()])

    def order(self) -> Order:
        """See base class."""
        return self._controller.order(LOCAL_LAUNCHER)

    def report(self, report: Report) -> None:
        """See base class."""
        self._controller.record_report(LOCAL_LAUNCHER, report)

    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return attempt_group(order, self._token, self._job.start_timeout_seconds)

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        """See base class."""
        self._controller.end(outcome, is_immediate)


class FixedNodes(OrderSource):
    """The source of orders in a job with a fixed number of launchers, where each launcher runs its processes once."""

    def __init__(self, job: Job, group: Group):
        self._job, self.all_launchers = job, group
        self._outcome: Outcome | None = None
        self._job_name = new_job_name()  # node 0's value names the job's output
        self.host = reachable_address(job.coordinator, serves=group.rank == 0)

    def order(self) -> Order:
        """See base class."""
        if self._outcome:
            return Order(OrderKind.OVER, outcome=self._outcome)
        return Order(
            OrderKind.RUN, 0, self._job.node_rank, self._job.nodes, self._job.processes, launched=self._job_name
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
    """Yields the group of the launchers of an elastic job's attempt.

    Raises:
      PeerLostError: a launcher did not connect within the timeout.
    """
    if order.nodes == 1:
        yield LocalGroup()
        return
    group = RemoteGroup(
        order.address,
        rank=order.node,
        size=order.nodes,
        token=derive_token(token, order.purpose),
        timeout=timeout,
        noun="node",
        server_rank=LAUNCHER,
    )
    try:
        yield wait_for_members(group, timeout)
    finally:
        group.leave()
