"""The connection of a process to the server of its job's group."""

import concurrent.futures
import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from tfdist.cluster import exit_status
from tfdist.cluster.signals import caller_location
from tfdist.coordination import messages
from tfdist.coordination.group import (
    NO_GOODBYE,
    Group,
    Json,
    Listener,
    LostMember,
    name_member,
    silence_reason,
    subgroup_members,
)
from tfdist.coordination.job_token import split_address
from tfdist.coordination.messages import BadMessage, Message, MessageReader, Session, WrongSealError, encode
from tfdist.errors import SIGNAL_OFFSET, ExitCode, InputError, PeerLostError, TfdistError, error_summary

_RETRY_SECONDS = 0.1
_CHUNK = 1 << 16

_Connection = tuple[socket.socket, MessageReader, Session, Message]  # the message is the welcome


def _connect(address: str, hello: Message, token: str, limit: int, timeout: float, server: str) -> _Connection:
    """Connects and joins, retrying until the server answers; `hello` has no nonce yet; messages have at most `limit` bytes."""
    end = time.monotonic() + timeout
    problem = "no answer"
    while time.monotonic() < end:
        try:
            return _connect_once(address, hello, token, limit, end)
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(min(_RETRY_SECONDS, max(0.0, end - time.monotonic())))
    raise PeerLostError(f"{server} did not answer at {address} within {timeout:g} s ({problem}).")


def _connect_once(address: str, hello: Message, token: str, limit: int, end: float) -> _Connection:
    sock = socket.create_connection(split_address(address), timeout=max(end - time.monotonic(), _RETRY_SECONDS))
    try:
        if sock.getsockname() == sock.getpeername():  # TCP may connect an unused port to itself
            raise ConnectionRefusedError("Connection refused")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting, lines = encode(hello | {"nonce": messages.nonce()}), MessageReader(limit + messages.OVERHEAD)
        sock.sendall(greeting)
        _receive_first("challenge", sock, lines, end)
        session = Session(token, greeting[:-1], lines.line, is_server=False)
        lines.unseal = session.unseal
        sock.sendall(session.seal(encode({"type": "join"})))
        return sock, lines, session, _receive_first("welcome", sock, lines, end)
    except BaseException as error:
        sock.close()
        if isinstance(error, WrongSealError):
            raise InputError(messages.WRONG_TOKEN) from error
        if isinstance(error, BadMessage):
            raise InputError(
                f"A group of tfdist must answer at {address}. Received: {error}. Another program listens there: set "
                "TFDIST_COORDINATOR to another address, the same for every process."
            ) from error
        raise


def _receive_first(kind: str, sock: socket.socket, lines: MessageReader, end: float) -> Message:
    """Returns the next message, of this kind, without decoding the one after it, which may be sealed."""
    message = next(lines.feed(b""), None)
    while message is None:
        if (seconds_left := end - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(seconds_left)
        data = sock.recv(_CHUNK)
        message = next(lines.feed(data), None)
        if message is None and not data:
            raise ConnectionResetError("it closed the connection")
    if message["type"] == "refused":
        raise InputError(messages.printable(str(message.get("reason")), 1000))
    if message["type"] != kind:
        raise BadMessage(f"{message['type']!r:.80} instead of a {kind}")
    return message


JOIN_SECONDS = 2.0

_log = logging.getLogger("tfdist.coordination")


class Publications:
    """Delivers published values to their subscribers, in the order of publication.

    A thread runs while there are values to deliver.
    """

    def __init__(self, name: str):
        self._name = name  # of the thread
        self._lock = threading.Lock()  # guards the attributes below
        self._values: list[tuple[Hashable, Json]] = []
        self._listeners: dict[Hashable, list[Listener]] = {}  # by topic; only the first one receives values
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, topic: Hashable, value: Json) -> None:
        """Adds a value that was published to a topic."""
        with self._lock:
            self._values.append((topic, value))
            self._start()

    def subscribe(self, topic: Hashable, callback: Listener) -> None:
        """See `Group.subscribe`."""
        with self._lock:
            self._listeners.setdefault(topic, []).append(callback)
            self._start()

    def close(self) -> None:
        """Stops delivering values, and waits for a running callback to return."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def _start(self) -> None:
        if self._thread is None and self._next_index() is not None:
            self._thread = threading.Thread(target=self._deliver, name=self._name, daemon=True)
            self._thread.start()

    def _next_index(self) -> int | None:
        indices = (i for i, (topic, _) in enumerate(self._values) if self._listeners.get(topic))
        return None if self._closed else next(indices, None)

    def _deliver(self) -> None:
        while True:
            with self._lock:
                index = self._next_index()
                if index is None:
                    self._thread = None
                    return
                topic, value = self._values.pop(index)
                callback = self._listeners[topic][0]
            try:
                is_done = callback(value) is True
            except Exception:
                _log.exception("A subscriber of '%s' failed", topic)
                continue
            if is_done:
                with self._lock:
                    self._listeners[topic].remove(callback)


_members: weakref.WeakSet["Client"] = weakref.WeakSet()
os.register_at_fork(after_in_child=_members.clear)  # the connections belong to the parent


def leave_on_failure(member: "Client") -> None:
    """Makes a member leave its group if this process fails, even if other threads keep it running."""
    _members.add(member)
    _register_exit_handler()


@functools.cache
def _register_exit_handler() -> None:
    exit_status.on_uncaught_error(_leave_all)


def _leave_all(error: BaseException) -> None:
    code, reason = goodbye_of(error)
    if not is_planned(code):
        for member in [*_members]:
            member.leave(code, reason)


def is_planned(code: int) -> bool:
    """Returns whether a process that ends with this code does not count as lost."""
    return code in (ExitCode.DONE, ExitCode.PREEMPTED)


def goodbye_of(error: BaseException | None) -> tuple[int, str]:
    """Returns the exit code and the reason that a process sends when it leaves; `error` is its exception, if any."""
    if error is None:
        return ExitCode.DONE, ""
    if isinstance(error, TfdistError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return SIGNAL_OFFSET + signal.SIGINT, ""
    if isinstance(error, SystemExit):
        code = error.code
        return (int(code) & 0xFF if isinstance(code, int) else int(code is not None)), ""  # as in Python
    summary = error_summary(error)
    is_loss = "Horovod has been shut down" in summary  # by another rank's end
    return ExitCode.PEER_LOST if is_loss else ExitCode.FAILED, summary


SERVER_GRACE_SECONDS = 2.0  # time to wait for the server after a deadline or a goodbye


Ranks = tuple[int, ...]  # ranks in the job, in order


class _PendingGather(NamedTuple):
    ranks: Ranks
    name: str
    values: concurrent.futures.Future[list[Json]]


class Client:
    """Connects a process to the members of its job through a `Server`.

    A thread receives messages and sends heartbeats. The methods are documented in `Group`; `ranks` are the participants
    of an operation, including this process. Each set of ranks has its own operations and topics.

    Attributes:
      rank: this process's rank.
      size: number of members of the job.
      goodbye_code: exit code with which this process has left; None before that.
      departed_members: lost members whose losses are tolerated.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        size: int,
        token: str,
        timeout: float = 60.0,
        noun: str = "rank",
        server_rank: int = 0,
        on_left: Callable[[str], None] = lambda description: None,
    ):
        """Connects to the server, retrying until it answers.

        Args:
          address: `host:port` of the server.
          rank: this member's rank.
          size: number of members.
          token: the group's token.
          timeout: seconds to wait for the connection.
          noun: name of a member in messages.
          server_rank: the member, or `LAUNCHER`, that is reported as lost if the server fails.
          on_left: called with a description after this member has left; closes the server in the process that runs it.

        Raises:
          PeerLostError: the server did not answer in time.
          InputError: the server refused this member.
        """
        self.rank, self.size = rank, size
        self.goodbye_code: int | None = None
        self._noun, self._server_rank, self._on_left = noun, server_rank, on_left
        self._condition = threading.Condition()  # guards the attributes below; notifies of losses
        self._pending: dict[int, _PendingGather] = {}
        self._ticket_count = 0
        self._losses: list[LostMember] = []  # in the order in which they were reported
        self.departed_members: frozenset[int] = frozenset()
        self._departure_callbacks: list[Callable[[LostMember], None]] = []
        self._end_reason = ""  # why no more gathers can complete
        self._callbacks: list[tuple[Ranks, Callable[[LostMember], None]]] = []  # not called yet
        self._callback_threads: list[threading.Thread] = []
        self._has_left = False
        self._publications = Publications(f"{noun}-{rank}-group-publications")
        self._send_lock = threading.Lock()
        hello = {"type": "hello", "rank": rank, "size": size, "pid": os.getpid(), "host": socket.gethostname()}
        server = name_member(server_rank, noun)
        connection = _connect(address, hello, token, (size + 1) * messages.LIMIT, timeout, server)
        self._sock, self._lines, self._session, welcome = connection
        self._secret = messages.derive_token(token, welcome["nonce"])
        self._heartbeat, self._lost_after = float(welcome["heartbeat"]), float(welcome["lost_after"])
        self._sock.settimeout(self._lost_after)
        self._last_received = time.monotonic()  # of the last complete and verified message
        self._receive(self._lines.feed(b""))  # received together with the welcome
        self._thread = threading.Thread(target=self._run, name=f"{noun}-{rank}-group-member", daemon=True)
        self._thread.start()
        leave_on_failure(self)

    def gather(self, ranks: Ranks, name: str, value: Json, deadline: float) -> list[Json]:
        """See `Group.gather`."""
        with self._condition:
            if any((pending.ranks, pending.name) == (ranks, name) for pending in self._pending.values()):
                raise ValueError(
                    f"A name can be used by one operation at a time. Received: {name!r}, which is in progress."
                )
            self._ticket_count = ticket = self._ticket_count + 1
            place = caller_location() if threading.current_thread() is threading.main_thread() else ""
            message = {"type": "gather", "ranks": self.ranks_field(ranks), "ticket": ticket, "name": name}
            line = messages.encode_limited(message | {"value": value, "deadline": deadline, "place": place}, name)
            if self._end_reason:
                raise PeerLostError(f"'{name}' cannot complete: {self._end_reason}.")
            values: concurrent.futures.Future[list[Json]] = concurrent.futures.Future()
            self._pending[ticket] = _PendingGather(ranks, name, values)
        try:
            self._send(line)
            return values.result(min(deadline + SERVER_GRACE_SECONDS, threading.TIMEOUT_MAX))
        except TimeoutError:
            server = name_member(self._server_rank, self._noun)
            raise PeerLostError(
                f"{server}, which serves the group, did not answer '{name}' within {deadline:g} s."
            ) from None
        finally:
            with self._condition:
                self._pending.pop(ticket, None)

    def on_loss(self, ranks: Ranks, callback: Callable[[LostMember], None]) -> None:
        """See `Group.on_loss`."""
        with self._condition:
            if loss := self._first_loss(ranks):
                self._start_callback(loss, callback)
            else:
                self._callbacks.append((ranks, callback))

    def first_loss(self, ranks: Ranks, wait: float) -> LostMember | None:
        """See `Group.first_loss`.

        A caller that waits suspects a loss, so the server is asked to detect stopped members sooner.
        """
        with self._condition:
            loss = self._first_loss(ranks)
        if loss or not wait:
            return loss
        self._lost_after = min(self._lost_after, messages.DOUBTED_BEATS * self._heartbeat)
        self._send(encode({"type": "doubt"}))
        with self._condition:
            return self._condition.wait_for(lambda: self._first_loss(ranks), wait)

    def leave(self, code: int, reason: str) -> None:
        """See `Group.leave`.

        All threads of the group have ended when this returns. Later calls have no effect.
        """
        with self._condition:
            if self._has_left:
                return
            self._has_left, self.goodbye_code = True, code
        self._fail_gathers("this process has left the group")  # first, because the server answers a goodbye by closing
        self._send(encode({"type": "goodbye", "code": code, "reason": reason[:1000]}))
        with contextlib.suppress(OSError):  # the server may be gone
            self._sock.shutdown(socket.SHUT_WR)
        _join(self._thread)
        if self._thread.is_alive():  # a stopped server does not close its side
            self._disconnect()
            _join(self._thread)
        for thread in self._callback_threads:
            _join(thread)
        self._publications.close()
        self._sock.close()
        self._on_left(f"{name_member(self.rank, self._noun)} has left with code {code}")

    def ranks_field(self, ranks: Ranks) -> Ranks | None:
        """Returns the field `ranks` of a message; None stands for all members."""
        return None if len(ranks) == self.size else ranks

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._disconnect)
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(self._sock, selectors.EVENT_READ)
            now = last_beat = time.monotonic()
            while True:
                if selector.select(max(0.0, last_beat + self._heartbeat - now)) and not self._read():
                    return
                last_wake_time, now = now, time.monotonic()
                if now - last_wake_time > self._heartbeat + 1.0:  # this process was suspended, not the server
                    self._last_received = min(now, self._last_received + now - last_wake_time)
                if now - self._last_received > self._lost_after:
                    self._report_server_loss(silence_reason(self._lost_after))
                    return
                if now >= last_beat + self._heartbeat:
                    last_beat = now
                    self._send(encode({"type": "beat"}))

    def _read(self) -> bool:
        try:
            data = self._sock.recv(_CHUNK)
        except OSError as error:
            self._report_server_loss(f"its connection failed ({error})")
            return False
        if not data:
            self._report_server_loss(NO_GOODBYE)
        return self._receive(self._lines.feed(data)) and bool(data)

    def _receive(self, received: Iterable[Message]) -> bool:
        """Handles messages; if that fails, reports the server as lost and returns False."""
        try:
            for message in received:
                self._last_received = time.monotonic()
                self._handle(message)
        except BadMessage as error:
            self._report_server_loss(f"it sent {error}")
        except Exception as error:  # a field is missing or has another type; without this thread, gathers would hang
            _log.debug("A message from the group's server cannot be handled", exc_info=error)
            self._report_server_loss(f"it sent a message that cannot be handled ({type(error).__name__}: {error})")
        else:
            return True
        self._disconnect()
        return False

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if kind == "lost":
            loss = LostMember(message["rank"], message["reason"], message["code"], self._noun)
            if message.get("tolerated") and loss.rank != self.rank:
                with self._condition:
                    self.departed_members |= {loss.rank}
                    for callback in self._departure_callbacks:
                        self._start_callback(loss, callback)
            else:
                self._record_loss(loss)
        elif kind == "closed":
            self._fail_gathers(message["reason"] or "the group has ended")
        elif kind == "published":
            ranks = range(self.size) if message["ranks"] is None else message["ranks"]
            self._publications.put((tuple(ranks), message["topic"]), message["value"])
        elif kind == "waiting" and self._noun == "rank":  # launchers may wait for each other without limit
            name, missing, place = message["name"], message["missing"], message["place"]
            _log.warning("Rank %d waits for %s in '%s', called at %s.", self.rank, missing, name, place)
        elif kind in ("values", "failed"):
            with self._condition:
                pending = self._pending.get(message["ticket"])
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # this process is leaving
                if pending and kind == "values":
                    pending.values.set_result(message["values"])
                elif pending:
                    error = (InputError if message["misuse"] else PeerLostError)(message["failure"])
                    pending.values.set_exception(error)

    def _report_server_loss(self, reason: str) -> None:
        """Reports the loss of the server, unless its connection closes after a goodbye of either side."""
        with self._condition:
            is_expected = bool(self._end_reason)
        if not is_expected:
            self._record_loss(loss := LostMember(self._server_rank, reason, None, self._noun))
            self._fail_gathers(str(loss))

    def _record_loss(self, loss: LostMember) -> None:
        """Reports the loss of a member; the server fails the operations that need it."""
        with self._condition:
            if any(other_loss.rank == loss.rank for other_loss in self._losses):
                return
            self._losses.append(loss)
            callbacks, self._callbacks = self._callbacks, []
            for ranks, callback in callbacks:
                self.on_loss(ranks, callback)
            self._condition.notify_all()

    def _first_loss(self, ranks: Ranks) -> LostMember | None:
        """Returns the first loss that affects these ranks; the loss of the server affects all ranks."""
        return next((loss for loss in self._losses if loss.rank in ranks or loss.rank == self._server_rank), None)

    def _fail_gathers(self, reason: str) -> None:
        """Fails all pending and future gathers; the first loss, if any, is reported as the cause."""
        with self._condition:
            self._end_reason = self._end_reason or (str(self._losses[0]) if self._losses else reason)
            pending_gathers = list(self._pending.values())
        for pending in pending_gathers:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has just been answered
                error = PeerLostError(f"'{pending.name}' cannot complete: {self._end_reason}.")
                pending.values.set_exception(error)

    def _start_callback(self, loss: LostMember, callback: Callable[[LostMember], None]) -> None:
        thread = threading.Thread(target=callback, args=(loss,), name="group-loss", daemon=True)
        self._callback_threads.append(thread)
        thread.start()

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError), self._send_lock:  # the receiving thread reports the end of the connection
            try:
                self._sock.sendall(self._session.seal(line))
            except BaseException:  # part of it may have been sent; the server would reject what follows
                self._disconnect()
                raise

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join(SERVER_GRACE_SECONDS)


class ClientGroup(Group):
    """A group of some or all members of a job, which communicates through this process's client."""

    ranks: Ranks = ()  # implements the property of the base class

    def __init__(self, client: Client, ranks: Ranks):
        self._client, self.ranks = client, ranks
        self.rank, self.size = ranks.index(client.rank), len(ranks)

    @property
    def goodbye_code(self) -> int | None:
        return self._client.goodbye_code

    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        return self._client.gather(self.ranks, name, value, deadline)

    def publish(self, topic: str, value: Json) -> None:
        message = {"type": "publish", "ranks": self._client.ranks_field(self.ranks), "topic": topic, "value": value}
        self._client._send(messages.encode_limited(message, topic))

    def subscribe(self, topic: str, callback: Listener) -> None:
        self._client._publications.subscribe((self.ranks, topic), callback)

    def token_for(self, purpose: str) -> str:
        return messages.derive_token(self._client._secret, purpose)

    def on_loss(self, callback: Callable[[LostMember], None]) -> None:
        self._client.on_loss(self.ranks, callback)

    def first_loss(self, wait: float = 0.0) -> LostMember | None:
        return self._client.first_loss(self.ranks, wait)

    def tolerate_lost_members(self, ranks: Iterable[int]) -> None:
        expendable_ranks = {self.ranks[rank] for rank in ranks} | {self._client.rank}
        self._client._send(encode({"type": "tolerate", "ranks": sorted(expendable_ranks)}))

    def on_departure(self, callback: Callable[[LostMember], None]) -> None:
        with self._client._condition:
            self._client._departure_callbacks.append(callback)

    @property
    def departed_members(self) -> frozenset[int]:
        return frozenset(self.ranks.index(rank) for rank in self._client.departed_members if rank in self.ranks)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        return ClientGroup(self._client, tuple(self.ranks[member] for member in subgroup_members(self, ranks)))

    def leave(self, code: int = 0, reason: str = "") -> None:
        self._client.leave(code, reason)


class RemoteGroup(ClientGroup):
    """The group of all members of a job, which communicates through a `Server`; see `Client` for the arguments."""

    def __init__(self, address: str, *, rank: int, size: int, **arguments: Any):
        super().__init__(Client(address, rank=rank, size=size, **arguments), tuple(range(size)))
