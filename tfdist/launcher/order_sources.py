"""Sources of a launcher's orders: a job controller here or on another host, or a fixed number of nodes."""

import abc
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tfdist.coordination import Group, LocalGroup
from tfdist.coordination.calls import Connection
from tfdist.coordination.client import RemoteGroup
from tfdist.coordination.group import LAUNCHER, NO_GOODBYE, silence_reason
from tfdist.coordination.job_token import LOOPBACK, group_token, listen, split_address
from tfdist.coordination.join import wait_for_members
from tfdist.coordination.messages import WRONG_TOKEN, derive_token
from tfdist.errors import ExitCode, InputError, PeerLostError
from tfdist.launcher import node_group, orders
from tfdist.launcher.hosts import LOOPBACK_NAMES, Hosts, local_host_names, matches_host
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.orders import Order, OrderKind, Report, new_job_name
from tfdist.launcher.placement import reachable_address
from tfdist.launcher.rendezvous_server import LOST_AFTER_SECONDS, RendezvousServer

LOCAL_LAUNCHER = "this launcher"  # name of the first launcher
_POLL_SECONDS = 0.1  # polling interval for orders


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
        return self._controller.order(LOCAL_LAUNCHER)

    def report(self, report: Report) -> None:
        self._controller.record_report(LOCAL_LAUNCHER, report)

    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        return attempt_group(order, self._token, self._job.start_timeout_seconds)

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        self._controller.end(outcome, is_immediate)


class FixedNodes(OrderSource):
    """The source of orders in a job with a fixed number of launchers, where each launcher runs its processes once."""

    def __init__(self, job: Job, group: Group):
        self._job, self.all_launchers = job, group
        self._outcome: Outcome | None = None
        self._job_name = new_job_name()  # node 0's value names the job's output
        self.host = reachable_address(job.coordinator, serves=group.rank == 0)

    def order(self) -> Order:
        if self._outcome:
            return Order(OrderKind.OVER, outcome=self._outcome)
        return Order(
            OrderKind.RUN, 0, self._job.node_rank, self._job.nodes, self._job.processes, launched=self._job_name
        )

    def report(self, report: Report) -> None:
        self._outcome = report.outcome

    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        return contextlib.nullcontext(self.all_launchers)

    def conclude(self, outcome: Outcome) -> Outcome:
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


class RemoteAgent(OrderSource):
    """A launcher's connection to the rendezvous server, with a thread that polls for orders; a context manager.

    Raises:
      PeerLostError: the server did not respond in time.
      InputError: the server has another token.
    """

    def __init__(self, job: Job, token: str):
        self._job, self.all_launchers, self._token = job, LocalGroup(), token
        self._connection = Connection(job.coordinator, token, "the coordinator's launcher")
        self._call_lock, self._order_lock = threading.Lock(), threading.Lock()
        self._order = Order(OrderKind.WAIT)
        self._reported_attempt: int | None = None  # the last attempt that was reported
        self._has_left, self._ended = False, threading.Event()
        self._loss_outcome: Outcome | None = None
        self._join()
        self.host = reachable_address(job.coordinator, serves=False)
        self._thread = threading.Thread(target=self._poll, name="guest", daemon=True)
        self._thread.start()

    def order(self) -> Order:
        """See base class. Ignores orders for an attempt that has already ended here."""
        order, loss_outcome = self._order, self._loss_outcome
        is_active = order.kind in (OrderKind.RUN, OrderKind.STOP) and order.attempt != self._reported_attempt
        if loss_outcome and order.kind != OrderKind.OVER:
            return Order(OrderKind.STOP if is_active else OrderKind.OVER, order.attempt, outcome=loss_outcome)
        return order if is_active or order.kind == OrderKind.OVER else Order(OrderKind.WAIT)

    def report(self, report: Report) -> None:
        """See base class. Leaves the job if the end of this launcher was requested."""
        self._reported_attempt = self._order.attempt
        with contextlib.suppress(PeerLostError):  # the polling thread detects the loss
            self._call("report", orders.encode_report(report))
        if report.stopped:
            self.end(report.outcome)

    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        return attempt_group(order, self._token, self._job.start_timeout_seconds)

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        with self._order_lock:
            self._has_left = True
            self._order = Order(OrderKind.OVER, outcome=outcome)
        with contextlib.suppress(PeerLostError):
            self._call("leave", {})

    def __enter__(self) -> "RemoteAgent":
        return self

    def __exit__(self, *_: object) -> None:
        self._has_left = True
        self._ended.set()
        self._thread.join(LOST_AFTER_SECONDS)
        self._connection.close()

    def _call(self, method: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._call_lock:  # the server knows a launcher by its connection
            return self._connection.call(method, values, seconds=LOST_AFTER_SECONDS).values

    def _join(self) -> None:
        timeout = self._job.start_timeout_seconds
        end = time.monotonic() + timeout
        while True:
            try:
                self._call("join", {"places": local_host_names()})
                return
            except PeerLostError as error:
                if isinstance(error.__cause__, PermissionError):
                    raise InputError(WRONG_TOKEN) from error
                if time.monotonic() > end:
                    raise PeerLostError(
                        f"the coordinator's launcher did not answer at {self._job.coordinator} within {timeout:g} s "
                        f"({error.__cause__})."
                    ) from error
            time.sleep(_POLL_SECONDS)

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            try:
                order = orders.decode_order(self._call("order", {}))
            except PeerLostError as error:
                is_silent = isinstance(error.__cause__, TimeoutError)
                reason = silence_reason(LOST_AFTER_SECONDS) if is_silent else NO_GOODBYE
                if not self._has_left:
                    self._loss_outcome = Outcome(ExitCode.PEER_LOST, f"the coordinator's launcher is lost: {reason}")
                return
            with self._order_lock:
                if not self._has_left:  # otherwise the job is over
                    self._order = order
            if order.kind == OrderKind.OVER:
                self._connection.close()
                return


@contextlib.contextmanager
def open_order_source(job: Job, environment: Mapping[str, str], say: Callable[[str], object]) -> Iterator[OrderSource]:
    """Yields the order source of this launcher.

    Raises:
      PeerLostError: the launcher of another host did not connect.
      InputError: the coordinator's address or `--hosts` is invalid.
    """
    with contextlib.ExitStack() as stack:
        if job.nodes > 1:
            yield FixedNodes(job, stack.enter_context(node_group.launchers(job, environment)))
            return
        listener = _listener(job.coordinator) if job.is_elastic and job.coordinator else None
        if job.is_elastic and job.coordinator and listener is None:
            yield stack.enter_context(RemoteAgent(job, _token(job, environment)))
            return
        hosts = stack.enter_context(Hosts(job.hosts)) if job.hosts else None
        controller = JobController(job, say, host_slots=lambda: hosts.slots if hosts else None, job_name=new_job_name())
        token = _token(job, environment) if listener else ""
        # Created before remote launchers join: the first launcher owns the job.
        local_controller = LocalController(job, controller, token)
        if listener:
            stack.enter_context(RendezvousServer(listener, split_address(job.coordinator)[0], token, controller))
        yield local_controller


def _token(job: Job, environment: Mapping[str, str]) -> str:
    return group_token(node_group.token(job, environment), "launcher", job.coordinator)


def _listener(coordinator: str) -> socket.socket | None:
    """Returns the rendezvous server's socket if this is the first launcher on the coordinator's host, else None."""
    if not is_this_host(split_address(coordinator)[0]):
        return None
    try:
        return listen(coordinator, "Choose another --coordinator, the same on every host.")
    except InputError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            return None  # used by an earlier launcher, or by another program, to which the connection will fail
        raise


def is_this_host(host: str) -> bool:
    """Returns whether a host name or address is this host's; False if it cannot be resolved."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    names = [*LOOPBACK_NAMES, *local_host_names()]
    return any(matches_host(str(info[4][0]).partition("%")[0], names) for info in infos)
