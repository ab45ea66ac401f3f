"""The server of a group: a single thread that serves all connections and pending operations."""

import contextlib
import dataclasses
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tfdist.coordination import messages
from tfdist.coordination.client import is_planned
from tfdist.coordination.group import NO_GOODBYE, Json, LostMember, name_ranks, silence_reason
from tfdist.coordination.job_token import join_address
from tfdist.coordination.messages import BadMessage, Message, MessageReader, Session, WrongSealError, encode
from tfdist.errors import describe_code

_CHUNK = 1 << 16
_log = logging.getLogger("tfdist.coordination")


class Connection:
    """A non-blocking connection that owns its socket and registers it with a selector, with this object as the key's data.

    Attributes:
      rank: the member's rank; None before it is admitted.
      hello: the message that was answered by a challenge; None before that.
      accept_time: `time.monotonic()` when the connection was accepted.
      last_received: `time.monotonic()` of the last complete and verified message before `end`.
      lines: splits the received data into messages.
      session: seals the messages; None before the challenge.
      peer: address of the other end, for logs.
      is_ending: whether the last message has been queued; data received afterwards is discarded.
      is_closed: whether the socket is closed.
    """

    def __init__(self, sock: socket.socket, peer: str, selector: selectors.BaseSelector):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank: int | None = None
        self.hello: Message | None = None
        self.session: Session | None = None
        self.accept_time = self.last_received = time.monotonic()
        self.lines = MessageReader(messages.LIMIT_BEFORE_HELLO)
        self.peer = peer
        self.is_ending = False
        self.is_closed = False
        self._sock, self._selector = sock, selector
        self._send_buffer = bytearray()
        selector.register(sock, selectors.EVENT_READ, self)

    def receive(self) -> bytes | None:
        """Returns the data received, or None at the end of the connection."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return b""
        except OSError:  # reset by the peer: treated as a normal end
            return None
        return data or None

    def send(self, message: Message) -> None:
        """Queues a message and sends as much as possible without blocking."""
        if not self.is_ending:
            line = encode(message)
            self._send_buffer += self.session.seal(line) if self.session else line
            self.flush()

    def challenge(self, hello: Message, token: str) -> None:
        """Answers a hello, which must be the last message read; all later messages must be sealed with the token."""
        challenge = {"type": "challenge", "nonce": messages.nonce()}
        self.send(challenge)
        self.hello, self.session = hello, Session(token, self.lines.line, encode(challenge)[:-1], is_server=True)
        self.lines.unseal, self.lines.limit = self.session.unseal, messages.LIMIT_BEFORE_HELLO + messages.OVERHEAD

    def end(self) -> None:
        """Sends the queued data, and closes when the other end has closed.

        Closing immediately would reset the connection if a message is still arriving, which could lose the last message.
        """
        self.is_ending = True
        self.flush()

    def flush(self) -> None:
        """Sends as much of the queued data as possible without blocking."""
        if self.is_closed:
            return
        try:
            while self._send_buffer:
                del self._send_buffer[: self._sock.send(self._send_buffer)]
            if self.is_ending:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._send_buffer.clear()  # the next receive detects the end
        write_event = selectors.EVENT_WRITE if self._send_buffer else 0
        self._selector.modify(self._sock, selectors.EVENT_READ | write_event, self)

    def close(self) -> None:
        """Closes the connection immediately."""
        if not self.is_closed:
            self.is_closed = True
            self._selector.unregister(self._sock)
            self._sock.close()


DEADLOCK_SECONDS = 10.0  # after which members that wait for each other get an error
OVERDUE_SECONDS = 20.0  # after which waiting members are notified of the missing ones


class Answer(NamedTuple):
    """A message for a member."""

    rank: int
    message: Message


@dataclasses.dataclass(eq=False)
class PendingOperation:
    """An operation that some members have called."""

    name: str
    ranks: Sequence[int]
    tickets: dict[int, int] = dataclasses.field(default_factory=dict)  # by rank, the member's id of its request
    values: dict[int, Json] = dataclasses.field(default_factory=dict)  # by rank
    deadline: float = math.inf  # the shortest deadline of the waiting members, in seconds
    expiry_time: float = math.inf  # time at which this deadline has passed
    failure: str = ""  # for members that arrive later; empty while it is open
    locations: dict[int, str] = dataclasses.field(default_factory=dict)  # by rank, where the main thread waits
    start_time: float = math.inf  # when the first member arrived
    is_reported: bool = False  # whether the waiting members have been notified of the missing ones
    is_misuse: bool = False  # whether it failed because the ranks' programs make different calls
    deadlock_time: float = math.inf  # when a deadlock was detected

    def fail(self, failure: str, is_misuse: bool = False) -> Iterator[Answer]:
        """Fails the operation for all members, including members that arrive later."""
        self.failure, self.expiry_time, self.is_misuse = failure, math.inf, is_misuse
        for rank, ticket in self.tickets.items():
            yield Answer(rank, _failure_message(ticket, failure, is_misuse))
        self.values.clear()


class PendingOperations:
    """All pending operations of a job's group and its subgroups.

    A member's value belongs to the oldest pending operation of its ranks and name that the member has not called yet.
    """

    def __init__(
        self, size: int, noun: str = "rank", describe_absence: Callable[[list[int]], str] = lambda missing: ""
    ):
        self._size = size
        self._noun = noun
        self._describe_absence = describe_absence
        self._operations: dict[tuple[Sequence[int], str], list[PendingOperation]] = {}
        self._departure_reasons: dict[int, str] = {}  # why members no longer participate, by rank
        self._absent_ranks: set[int] = set()  # lost members without which operations complete
        self._misuse_reason = ""  # why some members can never join

    def add(self, rank: int, message: Message, now: float) -> list[Answer]:
        """Records the value of a member's `gather` message, received at `now` in seconds; returns the messages to send.

        The `place` of the message is the line of the program at which the member's main thread waits; empty if another thread
        waits.
        """
        ticket, name, value, deadline = (message[field] for field in ("ticket", "name", "value", "deadline"))
        location = message["place"]
        key = (_ranks_of(message) or range(self._size), name)
        operations = self._operations.setdefault(key, [])
        entry = next((operation for operation in operations if rank not in operation.tickets), None)
        if entry is None:
            operations.append(entry := PendingOperation(name, key[0]))
        entry.tickets[rank] = ticket
        entry.start_time = min(entry.start_time, now)
        if location:
            entry.locations[rank] = location
        answers: list[Answer] = []
        if entry.failure:
            answers = [Answer(rank, _failure_message(ticket, entry.failure, entry.is_misuse))]
        else:
            entry.values[rank] = value
            if now + deadline < entry.expiry_time:
                entry.deadline, entry.expiry_time = deadline, now + deadline
            answers = self._outcome(entry)
        self._remove_completed(key)
        self._update_deadlocks(now)
        return answers

    def expire(self, now: float) -> list[Answer]:
        """Fails operations whose deadline has passed, and operations that wait for each other."""
        answers: list[Answer] = []
        for entry in self._open_operations():
            if entry.expiry_time <= now:
                missing = self._missing(entry)
                names = name_ranks(missing, self._noun)
                failure = f"{names} did not reach '{entry.name}' within {entry.deadline:g} s{self._describe_absence(missing)}."
                answers += entry.fail(failure)
        self._update_deadlocks(now)
        deadlocked_entries = [
            entry for entry in self._open_operations() if entry.deadlock_time + DEADLOCK_SECONDS <= now
        ]
        return answers + (self._fail_deadlock(deadlocked_entries) if deadlocked_entries else [])

    def overdue_notices(self, now: float) -> list[Answer]:
        """Returns messages that tell members that wait for long which members are missing, once per operation."""
        overdue_operations = [
            operation
            for operation in self._open_operations()
            if not operation.is_reported and operation.start_time + OVERDUE_SECONDS <= now
        ]
        answers = []
        for entry in overdue_operations:
            entry.is_reported = True
            missing = name_ranks(self._missing(entry), self._noun)
            answers += [
                Answer(rank, {"type": "waiting", "name": entry.name, "missing": missing, "place": location})
                for rank, location in entry.locations.items()
            ]
        return answers

    def next_expiry(self) -> float:
        """Returns the time of the next deadline."""
        return min((entry.expiry_time for entry in self._open_operations()), default=math.inf)

    def _update_deadlocks(self, now: float) -> None:
        deadlocked_entries = self._find_deadlocks()
        for entry in self._open_operations():
            entry.deadlock_time = min(entry.deadlock_time, now) if entry in deadlocked_entries else math.inf

    def _find_deadlocks(self) -> Sequence[PendingOperation]:
        """Returns operations that wait for each other in a cycle, or for operations in a cycle.

        Only main threads are considered, because other threads may still call an operation.
        """
        operation_by_rank = {
            rank: entry for entry in self._open_operations() for rank in entry.locations
        }  # of main threads
        candidates: Sequence[PendingOperation] = list(dict.fromkeys(operation_by_rank.values()))
        while True:
            remaining = [
                entry
                for entry in candidates
                if any(operation_by_rank.get(rank) in candidates for rank in self._missing(entry))
            ]
            if len(remaining) == len(candidates):
                return candidates
            candidates = remaining

    def _fail_deadlock(self, deadlocked_entries: Sequence[PendingOperation]) -> list[Answer]:
        def suffix(ranks: Sequence[int]) -> str:
            return "" if len(ranks) == self._size else f" of {name_ranks(list(ranks), self._noun)}"

        waits_by_rank = {
            rank: (entry, location) for entry in deadlocked_entries for rank, location in entry.locations.items()
        }
        locations = "; ".join(
            f"{self._noun} {rank} in '{entry.name}'{suffix(entry.ranks)} at {location}"
            for rank, (entry, location) in sorted(waits_by_rank.items())
        )
        failure = (
            f"Every {self._noun} must make the same calls, in the same order. Received: {self._noun}s that wait for "
            f"each other: {locations}. Do not make calls conditional on the {self._noun}."
        )
        return [answer for entry in deadlocked_entries for answer in entry.fail(failure, is_misuse=True)]

    def fail_all(self, misuse: str) -> list[Answer]:
        """Fails all current and future operations, because some members can never join."""
        self._misuse_reason = misuse
        return self._outcomes()

    def record_member_departure(self, rank: int, description: str) -> list[Answer]:
        """Records that a member left without an error, and fails the operations that still need it."""
        self._departure_reasons[rank] = f"{self._noun} {rank} {description}"
        return self._outcomes()

    def record_member_loss(self, rank: int, loss: str) -> list[Answer]:
        """Records the loss of a member, and fails its operations; subgroups without it are not affected."""
        self._departure_reasons[rank] = loss
        pending = [entry for entry in self._open_operations() if rank in entry.ranks]
        return [a for entry in pending for a in entry.fail(f"'{entry.name}' cannot complete: {loss}.")]

    def tolerate_loss(self, rank: int) -> list[Answer]:
        """Records a tolerated loss: pending and later operations complete with None as the member's value."""
        self._absent_ranks.add(rank)
        answers = self._outcomes()
        for key in list(self._operations):
            self._remove_completed(key)
        return answers

    def _remove_completed(self, key: tuple[Sequence[int], str]) -> None:
        self._operations[key] = [entry for entry in self._operations[key] if self._missing(entry)]
        if not self._operations[key]:
            del self._operations[key]

    def _missing(self, entry: PendingOperation) -> list[int]:
        return [rank for rank in entry.ranks if rank not in entry.tickets and rank not in self._absent_ranks]

    def _open_operations(self) -> Iterable[PendingOperation]:
        return [entry for operations in self._operations.values() for entry in operations if not entry.failure]

    def _outcomes(self) -> list[Answer]:
        return [answer for entry in self._open_operations() for answer in self._outcome(entry)]

    def _outcome(self, entry: PendingOperation) -> list[Answer]:
        missing = self._missing(entry)
        if not missing:
            values = [entry.values.get(rank) for rank in entry.ranks]
            return [
                Answer(rank, {"type": "values", "ticket": ticket, "values": values})
                for rank, ticket in entry.tickets.items()
            ]
        if self._misuse_reason:
            return list(entry.fail(self._misuse_reason, is_misuse=True))
        reason = next((reason for rank, reason in self._departure_reasons.items() if rank in missing), "")
        return list(entry.fail(f"'{entry.name}' cannot complete: {reason}.")) if reason else []


def _failure_message(ticket: int, failure: str, is_misuse: bool = False) -> Message:
    return {"type": "failed", "ticket": ticket, "failure": failure, "misuse": is_misuse}


HEARTBEAT_SECONDS = 1.0  # between two heartbeats, in both directions
# Time without a heartbeat after which a member is lost; an engine that starts may block all threads of a process for less.
# After a member has reported a suspicion, because its engine has failed, three heartbeats are enough.
LOST_AFTER_SECONDS = 20.0
CLOSE_SECONDS = 2.0  # time to deliver the last messages when the server closes


class Server:
    """Serves a group on a listening socket until `close`.

    Attributes:
      address: `host:port` that it listens on.
      size: number of members.
      loss: the first member that was lost, or None.
      tolerated_members: members whose losses are tolerated, see `Group.tolerate_lost_members`.
      departed_members: tolerated members that were lost.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        size: int,
        token: str,
        noun: str = "rank",
        addresses: Sequence[str] = (),
    ):
        """Starts serving.

        Args:
          listener: a listening socket; the server closes it.
          size: number of members.
          token: token that members must know.
          noun: name of a member in messages.
          addresses: expected address of each member, by rank, for messages about members that never connected; empty if
            unknown.
        """
        self.address = join_address(*listener.getsockname()[:2])
        self.loss: LostMember | None = None
        self._losses: list[LostMember] = []
        self.tolerated_members: frozenset[int] = frozenset()
        self.departed_members: frozenset[int] = frozenset()
        self.size = size
        self._token, self._noun = token, noun
        self._nonce = messages.nonce()  # for tokens that members derive, because other groups may share the token
        self._addresses = addresses
        self._heartbeat, self._lost_after = HEARTBEAT_SECONDS, LOST_AFTER_SECONDS
        self._operations = PendingOperations(size, noun, self._describe_absence)
        self._members: dict[int, Connection] = {}
        self._member_descriptions: dict[int, str] = {}  # pid and host by rank, including former members
        self._listener = listener
        self._wake_sender, self._wake_receiver = socket.socketpair()  # writing to the first one wakes the thread
        self._close_reason = ""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"{noun}-group-server", daemon=True)
        self._thread.start()

    @property
    def has_members(self) -> bool:
        """Whether a member is connected."""
        return bool(self._members)

    def absent_ranks(self) -> list[int]:
        """Returns the members that never connected."""
        return [rank for rank in range(self.size) if rank not in self._member_descriptions]

    def close(self, reason: str = "the group is closed") -> None:
        """Notifies the members that the group is closed, and joins the thread. May be called several times."""
        if not self._close_reason:
            self._close_reason = reason
            with contextlib.suppress(OSError):  # the thread may have failed
                self._wake_sender.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
            self._send_goodbyes()
        finally:
            for connection in self._connections():
                connection.close()
            self._selector.close()
            for sock in (self._listener, self._wake_sender, self._wake_receiver):
                sock.close()

    def _serve(self) -> None:
        last_wake_time = last_beat = time.monotonic()
        while not self._close_reason:
            wake_time = min(last_beat + self._heartbeat, self._operations.next_expiry())
            for key, mask in self._selector.select(max(0.0, wake_time - last_wake_time)):
                self._handle_event(key, mask)
            now = time.monotonic()
            if now - last_wake_time > self._heartbeat + 1.0:  # this process was suspended or starved, not the members
                for connection in self._connections():
                    connection.last_received += now - last_wake_time
                    connection.accept_time += now - last_wake_time
            last_wake_time = now
            self._send(self._operations.expire(now))
            self._send(self._operations.overdue_notices(now))
            if now >= last_beat + self._heartbeat:
                last_beat = now
                self._beat(now)

    def _handle_event(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, Connection):
            try:
                if mask & selectors.EVENT_WRITE:
                    key.data.flush()
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
            except Exception as error:  # affects this connection only
                _log.exception("Dropped a connection from %s, which could not be served", key.data.peer)
                self._drop(key.data, f"it could not be served ({type(error).__name__}: {error})")

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:  # the client has disconnected, or there are no resources for another connection yet
            return
        unauthenticated_connections = [connection for connection in self._connections() if connection.rank is None]
        if len(unauthenticated_connections) >= messages.MAX_UNAUTHENTICATED:  # a member sends its hello immediately
            min(unauthenticated_connections, key=lambda connection: connection.accept_time).close()
        try:
            Connection(sock, peer[0], self._selector)
        except OSError:  # an immediate reset
            sock.close()

    def _read(self, connection: Connection) -> None:
        data = connection.receive()
        if connection.is_ending:
            if data is None:
                connection.close()
            return
        if data is None:
            self._drop(connection, NO_GOODBYE)
            return
        try:
            for message in connection.lines.feed(data):
                connection.last_received = time.monotonic()
                self._handle(connection, message)
        except WrongSealError as error:
            if connection.rank is None:
                connection.session = None  # the other end does not know the token
                self._refuse(connection, messages.WRONG_TOKEN)
            else:
                self._drop(connection, f"it sent {error}")
        except BadMessage as error:
            _log.debug("Dropped a connection from %s, which sent %s", connection.peer, error)
            self._drop(connection, f"it sent {error}")

    def _handle(self, connection: Connection, message: Message) -> None:
        if connection.is_ending:
            return
        rank = connection.rank
        if rank is None and connection.hello:  # this message is sealed, so the sender knows the token
            self._admit(connection, connection.hello)
        elif rank is None:
            connection.challenge(message, self._token)
        elif message["type"] == "gather":
            self._send(self._operations.add(rank, message, time.monotonic()))
        elif message["type"] == "publish":
            self._send(
                [Answer(member, message | {"type": "published"}) for member in _ranks_of(message) or self._members]
            )
        elif message["type"] == "tolerate":
            self.tolerated_members |= {*message["ranks"]} - {rank}
        elif message["type"] == "doubt":
            self._lost_after = min(self._lost_after, messages.DOUBTED_BEATS * self._heartbeat)
        elif message["type"] == "goodbye":
            self._goodbye(connection, rank, message["code"], message["reason"])

    def _refuse(self, connection: Connection, refusal: str) -> None:
        _log.warning("Refused a connection from %s. %s", connection.peer, messages.printable(refusal, 1000))
        connection.send({"type": "refused", "reason": refusal})
        connection.end()

    def _admit(self, connection: Connection, hello: Message) -> None:
        if refusal := messages.join_refusal(hello, self.size, self._noun, self._member_descriptions):
            self._refuse(connection, refusal)
            if hello["rank"] in self._member_descriptions and self.absent_ranks():
                # The process has the wrong rank, so another rank will never join.
                self._send(self._operations.fail_all(refusal))
            return
        rank: int = hello["rank"]
        connection.rank, connection.lines.limit = rank, messages.LIMIT + messages.OVERHEAD
        self._member_descriptions[rank] = f"pid {hello['pid']} on {hello['host']}"
        self._members[rank] = connection
        seconds = {"heartbeat": self._heartbeat, "lost_after": self._lost_after}
        connection.send({"type": "welcome", "nonce": self._nonce} | seconds)
        for loss in self._losses:
            connection.send(_lost_message(loss))

    def _goodbye(self, connection: Connection, rank: int, code: int, reason: str) -> None:
        if not is_planned(code):
            description = f"ended with {describe_code(code)}" + (f": {reason}" if reason else "")
            self._drop(connection, description, code)
        else:
            del self._members[rank]
            connection.end()
            description = describe_code(code) if code else "code 0"
            self._send(self._operations.record_member_departure(rank, f"has left with {description}"))

    def _drop(self, connection: Connection, reason: str, code: int | None = None) -> None:
        """Closes a connection; reports its member, if any, as lost to all members."""
        rank = connection.rank
        if rank is not None and rank in self._members:
            loss, is_tolerated = LostMember(rank, reason, code, self._noun), rank in self.tolerated_members
            for member in self._members.values():
                member.send(_lost_message(loss) | {"tolerated": is_tolerated})
            if is_tolerated:
                self.departed_members |= {rank}
                self._send(self._operations.tolerate_loss(rank))
            else:
                self.loss = self.loss or loss
                self._losses.append(loss)
                self._send(self._operations.record_member_loss(rank, str(loss)))
            del self._members[rank]
        connection.end()

    def _beat(self, now: float) -> None:
        for connection in self._connections():
            if connection.is_ending or connection.rank is None:
                start_time = connection.last_received if connection.is_ending else connection.accept_time
                if now - start_time > messages.HELLO_SECONDS:
                    connection.close()
            elif now - connection.last_received > self._lost_after:
                self._drop(connection, silence_reason(self._lost_after))
            else:
                connection.send({"type": "beat"})

    def _send(self, answers: list[Answer]) -> None:
        # Rank 0 last: its client may run in this process and then call an engine that waits for the other ranks and blocks all
        # threads, including this one, as tf.distribute does when it connects.
        for rank, message in sorted(answers, key=lambda answer: -answer.rank):
            if rank in self._members:
                self._members[rank].send(message)

    def _describe_absence(self, missing: list[int]) -> str:
        absent_ranks = [rank for rank in missing if rank not in self._member_descriptions]
        if not absent_ranks:
            return ""
        members = [f"{rank} at {self._addresses[rank]}" if self._addresses else str(rank) for rank in absent_ranks]
        return f" (never connected: {self._noun} {', '.join(members)})"

    def _connections(self) -> list[Connection]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, Connection)]

    def _send_goodbyes(self) -> None:
        for connection in self._connections():
            if connection.rank is None:  # it was never admitted
                connection.close()
            else:
                connection.send({"type": "closed", "reason": self._close_reason})
                connection.end()
        end = time.monotonic() + CLOSE_SECONDS
        while self._connections() and time.monotonic() < end:
            for key, mask in self._selector.select(0.05):
                if isinstance(key.data, Connection):
                    self._handle_event(key, mask)


def _ranks_of(message: Message) -> tuple[int, ...] | None:
    return None if message["ranks"] is None else tuple(message["ranks"])


def _lost_message(loss: LostMember) -> Message:
    return {"type": "lost", "rank": loss.rank, "reason": loss.reason, "code": loss.code}
