"""Provides a launcher's orders, from a job controller or, in a job with a fixed number of nodes, locally."""

import abc
import contextlib
import math
import signal
from collections.abc import Iterator

from tfdist.coordination import Group, LocalGroup
from tfdist.coordination.client import RemoteGroup
from tfdist.coordination.group import LAUNCHER
from tfdist.coordination.job_token import LOOPBACK
from tfdist.coordination.join import wait_for_members
from tfdist.coordination.messages import derive_token
from tfdist.errors import SIGNAL_OFFSET, ExitCode, PeerLostError, describe_code
from tfdist.launcher.hosts import LOOPBACK_NAMES, local_host_names
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.orders import Order, OrderKind, Report, new_job_name
from tfdist.launcher.orphan_guard import END_SIGNALS
from tfdist.launcher.placement import reachable_address

LOCAL_LAUNCHER = "this launcher"  # name of the first launcher
_POLL_SECONDS = 0.1  # polling interval for orders


class OrderSource(abc.ABC):
    """The source of a launcher's orders.

    Attributes:
      host: address at which the other launchers reach this host.
      all_launchers: group of all launchers of the job if their number is fixed, else of this launcher only.
    """

    host: str = LOOPBACK

    def __init__(self, job: Job, token: str = "", all_launchers: Group | None = None):
        self._job, self._token, self.all_launchers = job, token, all_launchers or LocalGroup()

    @abc.abstractmethod
    def order(self) -> Order:
        """Returns the current order for this launcher. Must be polled."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Reports the end of the ordered attempt."""

    @contextlib.contextmanager
    def launchers(self, order: Order) -> Iterator[Group]:
        """Yields the group of the attempt's launchers.

        Raises:
          PeerLostError: a launcher did not connect in time.
        """
        if order.nodes == 1:
            yield LocalGroup()
            return
        token, timeout = attempt_token(self._token, order.attempt), self._job.start_timeout_seconds
        group = RemoteGroup(
            order.address,
            rank=order.node,
            size=order.nodes,
            token=token,
            timeout=timeout,
            noun="node",
            server_rank=LAUNCHER,
        )
        try:
            yield wait_for_members(group, timeout)
        finally:
            group.leave()

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        """Requests the end of this launcher between attempts; with `is_immediate`, without waiting for other hosts."""

    def conclude(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the job, after all launchers have ended."""
        return outcome


class LocalController(OrderSource):
    """The source of the first launcher's orders: a job controller in the same process."""

    def __init__(self, job: Job, controller: JobController, token: str = ""):
        super().__init__(job, token)
        self._controller = controller
        self.host = reachable_address(job.coordinator if job.is_elastic else "", serves=True)
        controller.add_launcher(LOCAL_LAUNCHER, [*LOOPBACK_NAMES, *local_host_names()])

    def order(self) -> Order:
        return self._controller.order(LOCAL_LAUNCHER)

    def report(self, report: Report) -> None:
        self._controller.record_report(LOCAL_LAUNCHER, report)

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        self._controller.end(outcome, is_immediate)


class FixedNodes(OrderSource):
    """The source of orders in a job with a fixed number of launchers, where each launcher runs its processes once."""

    def __init__(self, job: Job, group: Group):
        super().__init__(job, all_launchers=group)
        self._outcome: Outcome | None = None
        self._job_name = new_job_name()  # node 0's value names the job's output
        self.host = reachable_address(job.coordinator, serves=group.rank == 0)

    def order(self) -> Order:
        if self._outcome:
            return Order(OrderKind.OVER, outcome=self._outcome)
        job = self._job
        return Order(OrderKind.RUN, 0, job.node_rank, job.nodes, job.processes, job_name=self._job_name)

    def report(self, report: Report) -> None:
        self._outcome = report.outcome

    @contextlib.contextmanager
    def launchers(self, order: Order) -> Iterator[Group]:
        yield self.all_launchers

    def conclude(self, outcome: Outcome) -> Outcome:
        """See base class. Waits for the other launchers unless the local processes have failed."""
        group, grace = self.all_launchers, self._job.grace_seconds
        if outcome.code not in (ExitCode.DONE, ExitCode.PREEMPTED) or group.goodbye_code is not None:
            group.leave(outcome.code, outcome.reason)
            return outcome
        try:
            codes = group.gather("launch/end", int(outcome.code), grace if outcome.code else math.inf)
        except PeerLostError as error:
            return self._outcome_of_loss(outcome, error)
        if outcome.code or ExitCode.PREEMPTED not in codes:
            return outcome
        node = codes.index(ExitCode.PREEMPTED)
        return Outcome(ExitCode.PREEMPTED, f"ranks of node {node} ended with {describe_code(ExitCode.PREEMPTED)}")

    def _outcome_of_loss(self, local_outcome: Outcome, error: PeerLostError) -> Outcome:
        group, grace = self.all_launchers, self._job.grace_seconds
        loss, reason = group.first_loss(), str(error).rstrip(".")
        if loss and local_outcome.code and (loss.code is None or is_request(loss.code)):  # this node's ranks have saved
            return local_outcome
        if local_outcome.code and not loss:
            reason += f" of the end of this node's ranks, which were preempted (--grace_seconds={grace:g})"
        outcome = lost_launcher(group) or Outcome(error.exit_code, reason)
        group.leave(outcome.code, outcome.reason)
        return outcome


def attempt_token(token: str, attempt: int) -> str:
    """Returns the token of the launchers' group in an attempt."""
    return derive_token(token, f"attempt {attempt}")


def is_request(code: int) -> bool:
    """Returns whether an exit code means that the end of a launcher was requested, or its output closed."""
    return code - SIGNAL_OFFSET in (*END_SIGNALS, signal.SIGPIPE)


def lost_launcher(group: Group) -> Outcome | None:
    """Returns the outcome of the job if another launcher is lost, else None."""
    loss = group.first_loss()
    return Outcome(PeerLostError.exit_code if loss.code is None else loss.code, str(loss)) if loss else None
