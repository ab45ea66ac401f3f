"""A launcher that has connected to an elastic job's rendezvous server and follows its orders."""

import contextlib
import socket
import threading
from contextlib import AbstractContextManager

from tfdist.coordination import Group, LocalGroup
from tfdist.coordination.connect import connect, send_or_shut
from tfdist.coordination.group import NO_GOODBYE, silence
from tfdist.coordination.liveness import Liveness
from tfdist.coordination.messages import LIMIT, VERSION, BadMessage, encode
from tfdist.errors import ExitCode
from tfdist.launcher import orders
from tfdist.launcher.hosts import own_names
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.order_sources import OrderSource, attempt_group
from tfdist.launcher.orders import Order, OrderKind, Report
from tfdist.launcher.placement import own_host
from tfdist.launcher.rendezvous_server import BEAT_SECONDS, LOST_AFTER_SECONDS

_CHUNK = 1 << 16


class RemoteAgent(OrderSource):
    """A launcher's connection to the rendezvous server, with one receiving thread; a context manager."""

    def __init__(self, job: Job, token: str):
        """Connects, retrying until the rendezvous server answers.

        Args:
          job: has the address of the rendezvous server, and the time to wait for it.
          token: the job's token.

        Raises:
          PeerLostError: the server did not answer in time.
          InputError: the server refused this launcher.
        """
        self._job, self.everyone = job, LocalGroup()
        hello = {"type": "hello", "version": VERSION, "places": own_names()}
        server = "the coordinator's launcher"
        call = connect(job.coordinator, hello, token, LIMIT, job.start_timeout_seconds, server)
        self._token = token
        self._sock, self._lines, self._seal = call.sock, call.lines, call.seal
        self.host = own_host(job.coordinator, serves=False)
        self._order = Order(OrderKind.WAIT)
        self._done: int | None = None  # the last attempt that was reported
        self._left = False
        self._lost: Outcome | None = None
        self._sending, self._changing = threading.Lock(), threading.Lock()
        for message in call.following:
            self._receive_order(message)
        self._thread = threading.Thread(target=self._listen, name="guest", daemon=True)
        self._thread.start()

    def order(self) -> Order:
        """See base class. An order for an attempt that has already ended here is ignored."""
        order, lost = self._order, self._lost
        runs = order.kind in (OrderKind.RUN, OrderKind.STOP) and order.attempt != self._done
        if lost and order.kind != OrderKind.OVER:
            return Order(OrderKind.STOP if runs else OrderKind.OVER, order.attempt, outcome=lost)
        return order if runs or order.kind == OrderKind.OVER else Order(OrderKind.WAIT)

    def report(self, report: Report) -> None:
        """See base class. A launcher that was asked to end leaves afterwards."""
        self._done = self._order.attempt
        self._send(orders.report_message(report))
        if report.stopped:
            self.end(report.outcome)

    def launchers(self, order: Order) -> AbstractContextManager[Group]:
        """See base class."""
        return attempt_group(order, self._token, self._job.start_timeout_seconds)

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """See base class."""
        with self._changing:
            self._left = True
            self._order = Order(OrderKind.OVER, outcome=outcome)
        self._send({"type": "goodbye"})

    def __enter__(self) -> "RemoteAgent":
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(LOST_AFTER_SECONDS)
        self._sock.close()

    def _listen(self) -> None:
        problem = NO_GOODBYE
        try:
            self._follow()
        except (OSError, BadMessage) as error:
            problem = str(error)
        if not self._left:
            self._lost = Outcome(ExitCode.PEER_LOST, f"the coordinator's launcher is lost: {problem}")
        with contextlib.suppress(OSError):  # the rendezvous server does not wait for a main thread that hangs
            self._sock.shutdown(socket.SHUT_RDWR)

    def _follow(self) -> None:
        """Receives messages until the server closes the connection; raises `OSError` if it is silent."""
        self._sock.settimeout(BEAT_SECONDS)
        liveness = Liveness(self._lines, BEAT_SECONDS)
        while not liveness.is_silent(LOST_AFTER_SECONDS):
            self._send({"type": "beat"})
            try:
                data = self._sock.recv(_CHUNK)
            except TimeoutError:
                continue
            for message in self._lines.feed(data):
                liveness.heard()
                self._receive_order(message)
            if not data:
                return
        raise OSError(silence(LOST_AFTER_SECONDS))

    def _receive_order(self, message: dict[str, object]) -> None:
        if message["type"] == "order":
            with self._changing:
                if not self._left:  # the last order is that the job is over
                    self._order = orders.order_of(message)

    def _send(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError), self._sending:  # the receiving thread detects the end of the connection
            send_or_shut(self._sock, self._seal, encode(message))
