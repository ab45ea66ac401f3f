"""Sends orders to launchers on other hosts of an elastic job: the server on the coordinator's host, and its clients."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.coordination import Server
from tfdist.coordination.calls import Connection, Handler, Message, Service
from tfdist.coordination.group import NO_GOODBYE, silence_reason
from tfdist.coordination.job_token import join_address, listen, split_address
from tfdist.coordination.messages import WRONG_TOKEN, WrongSealError
from tfdist.errors import ExitCode, InputError, PeerLostError
from tfdist.launcher import orders
from tfdist.launcher.hosts import local_host_names
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.order_sources import OrderSource, attempt_token
from tfdist.launcher.orders import Order, OrderKind, Report
from tfdist.launcher.placement import reachable_address

_POLL_SECONDS = 0.1  # polling interval for orders
LOST_AFTER_SECONDS = 10.0  # without a call; no engine blocks a launcher's threads


class RendezvousServer(Service, contextlib.AbstractContextManager["RendezvousServer"]):
    """Connects other launchers, which poll for orders, to a `JobController`; a context manager."""

    def __init__(self, listener: socket.socket, host: str, token: str, controller: JobController):
        self._host, self._controller = host, controller
        self._condition = threading.Condition()  # guards the attributes below
        self._client_count, self._has_ended = 0, False
        self._indices = itertools.count(1)
        self._group: Server | None = None
        controller.open_group, controller.close_group = self.open_group, self.close_group
        super().__init__({}, token, listener, LOST_AFTER_SECONDS)

    def open_group(self, attempt: int, size: int) -> str:
        """Serves the group of an attempt's launchers, which replaces the last group; returns its address."""
        self.close_group()
        listener = listen(join_address(self._host, 0), "Choose another --coordinator, the same on every host.")
        self._group = Server(listener, size=size, token=attempt_token(self._token, attempt), noun="node")
        return join_address(self._host, split_address(self._group.address)[1])

    def close_group(self) -> None:
        """Closes the last group, whose launchers then stop waiting; does not affect running processes."""
        if self._group:
            self._group.close("the attempt is over")

    def __exit__(self, *_: object) -> None:
        """Closes the server when the launchers have received the outcome of the job."""
        with self._condition:
            self._has_ended = True
            self._condition.wait_for(lambda: not self._client_count, LOST_AFTER_SECONDS)
        self.close()
        self.close_group()

    @contextlib.contextmanager
    def handlers_for(self, address: str) -> Iterator[Mapping[str, Handler]]:
        """See base class. A launcher joins by its first call; if its connection ends before it has left, it is lost."""
        controller, name = self._controller, f"launcher {next(self._indices)} ({address})"

        def join(message: Message) -> Message:
            controller.add_launcher(name, [*message.values["places"], address])
            return Message({})

        def order(message: Message) -> Message:
            current_order = controller.order(name)
            if current_order.kind == OrderKind.OVER:
                controller.remove_launcher(name)
            elif self._has_ended:
                raise ConnectionError("the launcher has ended")
            return Message(orders.encode(current_order))

        def report(message: Message) -> Message:
            controller.record_report(name, orders.decode(Report, message.values))
            return Message({})

        def leave(message: Message) -> Message:
            controller.remove_launcher(name, "has left the job")
            return Message({})

        self._change_client_count(1)
        try:
            yield {handler.__name__: handler for handler in (join, order, report, leave)}
        except (OSError, WrongSealError) as error:
            reason = silence_reason(LOST_AFTER_SECONDS) if isinstance(error, TimeoutError) else NO_GOODBYE
            controller.lose_launcher(name, f"is lost: {reason}")
        finally:
            controller.remove_launcher(name)
            self._change_client_count(-1)

    def _change_client_count(self, change: int) -> None:
        with self._condition:
            self._client_count += change
            self._condition.notify_all()


class RemoteAgent(OrderSource, contextlib.AbstractContextManager["RemoteAgent"]):
    """A launcher's connection to the rendezvous server, with a thread that polls for orders; a context manager.

    Raises:
      PeerLostError: the server did not respond in time.
      InputError: the server has a different token.
    """

    def __init__(self, job: Job, token: str):
        super().__init__(job, token)
        self._connection = Connection(job.coordinator, token, "the coordinator's launcher")
        self._call_lock, self._order_lock = threading.Lock(), threading.Lock()
        self._order = Order(OrderKind.WAIT)
        self._reported_attempt: int | None = None  # the last attempt that was reported
        self._has_left, self._ended = False, threading.Event()
        self._loss_outcome: Outcome | None = None
        self._join()
        self.host = reachable_address(job.coordinator, serves=False)
        self._thread = threading.Thread(target=self._poll, name="launcher-orders", daemon=True)
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
        with contextlib.suppress(PeerLostError):
            self._call("report", orders.encode(report))
        if report.stopped:
            self.end(report.outcome)

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        with self._order_lock:
            self._has_left = True
            self._order = Order(OrderKind.OVER, outcome=outcome)
        with contextlib.suppress(PeerLostError):
            self._call("leave", {})

    def __exit__(self, *_: object) -> None:
        self._has_left = True
        self._ended.set()
        self._thread.join(LOST_AFTER_SECONDS)
        self._connection.close()

    def _call(self, method: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            with self._call_lock:  # the server knows a launcher by its connection
                return self._connection.call(method, values, seconds=LOST_AFTER_SECONDS).values
        except PeerLostError as error:
            is_silent = isinstance(error.__cause__, TimeoutError)
            reason = silence_reason(LOST_AFTER_SECONDS) if is_silent else NO_GOODBYE
            if not self._has_left:
                self._loss_outcome = Outcome(ExitCode.PEER_LOST, f"the coordinator's launcher is lost: {reason}")
            raise

    def _join(self) -> None:
        timeout = self._job.start_timeout_seconds
        end = time.monotonic() + timeout
        while True:
            try:
                self._connection.call("join", {"places": local_host_names()}, seconds=LOST_AFTER_SECONDS)
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
        with contextlib.suppress(PeerLostError):
            while not (self._ended.wait(_POLL_SECONDS) or self._loss_outcome):
                order = orders.decode(Order, self._call("order", {}))
                with self._order_lock:
                    if not self._has_left:  # otherwise the job is over
                        self._order = order
                if order.kind == OrderKind.OVER:
                    self._connection.close()
                    return
