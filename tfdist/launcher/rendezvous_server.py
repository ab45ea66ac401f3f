"""The server for launchers of an elastic job, in the launcher on the coordinator's host."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from tfdist.coordination import Server
from tfdist.coordination.client import Liveness, next_message
from tfdist.coordination.group import NO_GOODBYE, silence_reason
from tfdist.coordination.job_token import join_address, listen, split_address
from tfdist.coordination.messages import (
    HELLO_SECONDS,
    LIMIT,
    LIMIT_BEFORE_HELLO,
    MAX_UNAUTHENTICATED,
    OVERHEAD,
    BadMessage,
    Message,
    MessageReader,
    WrongSealError,
    create_challenge,
    derive_token,
    encode,
    nonce,
    take,
    version_refusal,
)
from tfdist.launcher import orders
from tfdist.launcher.job_controller import JobController

BEAT_SECONDS = 1.0  # interval of the heartbeats, in both directions
LOST_AFTER_SECONDS = 10.0  # without a heartbeat; no engine blocks a launcher's threads
_POLL_SECONDS = 0.1  # polling interval for orders
_CHUNK = 1 << 16
_log = logging.getLogger("tfdist.launch")


class RendezvousServer:
    """Connects other launchers to a `JobController`; a context manager.

    A thread accepts connections, and each launcher is served by its own thread. Unauthenticated connections are limited in
    number and in time.
    """

    def __init__(self, listener: socket.socket, host: str, token: str):
        self._listener, self._host, self._token = listener, host, token
        self._controller: JobController | None = None
        self._ended = threading.Event()
        self._numbers = itertools.count(1)
        self._group: Server | None = None
        self._threads: list[threading.Thread] = []
        self._unauthenticated: list[socket.socket] = []  # the oldest first

    def open(self, controller: JobController) -> None:
        """Starts to serve the controller's orders."""
        self._controller = controller
        self._start(self._accept)

    def open_group(self, names: Sequence[str]) -> tuple[str, str]:
        """Serves a group of launchers, which replaces the last group; returns its address and the purpose of its token."""
        self.close_group()
        purpose = nonce()
        listener = listen(join_address(self._host, 0), "Choose another --coordinator, the same on every host.")
        self._group = Server(listener, size=len(names), token=derive_token(self._token, purpose), noun="node")
        return join_address(self._host, split_address(self._group.address)[1]), purpose

    def __enter__(self) -> "RendezvousServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Waits until the launchers have received the outcome of the job.
        self._ended.set()
        for sock in (self._listener, *self._unauthenticated):
            _shut_down(sock)
        end = time.monotonic() + LOST_AFTER_SECONDS
        for thread in filter(threading.Thread.is_alive, self._threads):  # the last thread may not have started
            thread.join(max(0.0, end - time.monotonic()))
        self._listener.close()
        self.close_group()

    def close_group(self) -> None:
        """Closes the last group, whose launchers then stop waiting; does not affect running processes."""
        if self._group:
            self._group.close("the attempt is over")

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="rendezvous", daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                sock, peer = self._listener.accept()
            except OSError:  # the job is over, the client has disconnected, or there are no resources yet
                self._ended.wait(_POLL_SECONDS)
                continue
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:  # a launcher sends its hello immediately
                _shut_down(self._unauthenticated.pop(0))
            self._unauthenticated.append(sock)
            self._start(self._serve, sock, str(peer[0]))

    def _serve(self, sock: socket.socket, peer: str) -> None:
        with sock, contextlib.suppress(OSError, BadMessage):
            try:
                admission = self._admit(sock)
            finally:
                with contextlib.suppress(ValueError):  # already removed
                    self._unauthenticated.remove(sock)
            if not admission:
                return
            connection, host_names = admission
            connection.send({"type": "welcome"})
            self._serve_launcher(connection, f"launcher {next(self._numbers)} ({peer})", [*map(str, host_names), peer])
            sock.shutdown(socket.SHUT_WR)
            _wait_for_close(sock, time.monotonic() + HELLO_SECONDS)  # until the launcher has received the last order

    def _admit(self, sock: socket.socket) -> "tuple[_Connection, list[object]] | None":
        """Authenticates a launcher; returns its connection and host names, or None after refusing it."""
        end = time.monotonic() + HELLO_SECONDS
        lines = MessageReader(LIMIT_BEFORE_HELLO + OVERHEAD)
        hello = next_message(sock, lines, end)
        if refusal := version_refusal(hello):
            sock.sendall(encode({"type": "refused", "reason": refusal}))
            return None
        [places] = take(hello, places=list)
        challenge, session = create_challenge(self._token, lines.line)
        sock.sendall(encode(challenge))
        lines.unseal = session.unseal
        try:
            next_message(sock, lines, end)
        except WrongSealError:
            sock.sendall(encode({"type": "refused", "reason": "The launcher's token must match the job's."}))
            return None
        lines.limit = LIMIT + OVERHEAD
        return _Connection(sock, lines, session.seal), places

    def _serve_launcher(self, connection: "_Connection", name: str, host_names: Sequence[str]) -> None:
        assert self._controller
        self._controller.add_launcher(name, host_names)
        try:
            self._exchange_orders(connection, name)
        except (OSError, BadMessage) as error:
            self._controller.lose_launcher(name, f"is lost: {error}")
        except Exception as error:  # must not end the job
            _log.exception("%s could not be served", name)
            self._controller.lose_launcher(name, f"could not be served ({type(error).__name__}: {error})")
        finally:
            self._controller.remove_launcher(name)

    def _exchange_orders(self, connection: "_Connection", name: str) -> None:
        """Returns when the launcher has left or the job is over; raises `OSError` if the launcher is lost."""
        assert self._controller
        sock, last_order, last_beat = connection.sock, None, 0.0
        liveness = Liveness(connection.lines, _POLL_SECONDS)
        while not liveness.is_silent(LOST_AFTER_SECONDS):
            order = self._controller.order(name)
            now = time.monotonic()
            if order != last_order:
                sock.settimeout(LOST_AFTER_SECONDS)
                connection.send(orders.encode_order(order))
                last_order = order
                if order.kind == orders.OrderKind.OVER:
                    return
            elif self._ended.is_set():
                return
            elif now - last_beat > BEAT_SECONDS:
                connection.send({"type": "beat"})
                last_beat = now
            sock.settimeout(_POLL_SECONDS)
            try:
                data = sock.recv(_CHUNK)
            except TimeoutError:
                continue
            for message in connection.lines.feed(data):
                liveness.record_message()
                if message["type"] == "report":
                    self._controller.record_report(name, orders.decode_report(message))
                elif message["type"] == "goodbye":
                    self._controller.remove_launcher(name, "has left the job")
                    return
            if not data:
                raise OSError(NO_GOODBYE)
        raise OSError(silence_reason(LOST_AFTER_SECONDS))


class _Connection(NamedTuple):
    sock: socket.socket
    lines: MessageReader
    seal: Callable[[bytes], bytes]

    def send(self, message: Message) -> None:
        self.sock.sendall(self.seal(encode(message)))


def _wait_for_close(sock: socket.socket, end: float) -> None:
    """Reads until the other end closes the connection; raises `TimeoutError` at time `end`."""
    while (timeout := end - time.monotonic()) > 0:
        sock.settimeout(timeout)
        if not sock.recv(_CHUNK):
            return
    raise TimeoutError


def _shut_down(sock: socket.socket) -> None:
    """Unblocks the thread that uses a socket, which then closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
