"""The server of a group: one thread, one selector, its connections and the pending gathers."""

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

from tfdist.coordination.client import is_planned
from tfdist.coordination.group import NO_GOODBYE, Json, LostMember, name_ranks, silence
from tfdist.coordination.job_token import NO_RESOURCES, join_address
from tfdist.coordination.messages import (
    DOUBTED_BEATS,
    HELLO_SECONDS,
    LIMIT,
    LIMIT_BEFORE_HELLO,
    MAX_UNAUTHENTICATED,
    OVERHEAD,
    WRONG_TOKEN,
    BadMessage,
    LimitedLog,
    Message,
    MessageReader,
    Session,
    WrongSealError,
    challenged,
    deadline_of,
    encode,
    exit_code_of,
    join_refusal,
    nonce,
    ranks_of,
    take,
    version_refusal,
)
from tfdist.errors import exceptions

_CHUNK = 1 << 16


class Connection:
    """A non-blocking connection that owns its socket, registered with a selector, with this object as the key's data.

    Attributes:
      rank: the member's rank, after it has been welcomed.
      hello: the message that has been answered by a challenge; None before.
      accept_time: `time.monotonic()` when the connection was accepted.
      last_received: `time.monotonic()` of the last complete and verified message, not counting those after `end`.
      lines: splits the received data into messages.
      peer: address of the other end, for logs.
      is_ending: whether the last message has been queued; data received afterwards is discarded.
      is_closed: whether the socket is closed.
    """

    def __init__(self, sock: socket.socket, peer: str, selector: selectors.BaseSelector):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank: int | None = None
        self.hello: Message | None = None
        self._session: Session | None = None
        self.accept_time = self.last_received = time.monotonic()
        self.lines = MessageReader(LIMIT_BEFORE_HELLO)
        self.peer = peer
        self.is_ending = False
        self.is_closed = False
        self._sock, self._selector = sock, selector
        self._out = bytearray()
        selector.register(sock, selectors.EVENT_READ, self)

    @property
    def unread(self) -> int:
        """Number of bytes that the other end has not received yet."""
        return len(self._out)

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
            self._out += self._session.seal(line) if self._session else line
            self.flush()

    def challenge(self, hello: Message, token: str) -> None:
        """Answers a hello, the last message read; from now on messages must be sealed with the token."""
        challenge, session = challenged(token, self.lines.line)
        self.send(challenge)
        self.hello, self._session = hello, session
        self.lines.unseal, self.lines.limit = session.unseal, LIMIT_BEFORE_HELLO + OVERHEAD

    def refuse(self, reason: str, *, sealed: bool = True) -> None:
        """Sends a refusal and ends; not sealed if the other end does not know the token."""
        if not sealed:
            self._session = None
        self.send({"type": "refused", "reason": reason})
        self.end()

    def admit(self, rank: int) -> None:
        """Sets the rank of the member at the other end."""
        self.rank, self.lines.limit = rank, LIMIT + OVERHEAD

    def end(self) -> None:
        """Sends the queued data, and closes once the other end has closed too.

        Closing immediately would reset the connection if a message is still arriving, and could lose the last message
        sent.
        """
        self.is_ending = True
        self.flush()

    def flush(self) -> None:
        """Sends as much of the queued data as possible without blocking."""
        if self.is_closed:
            return
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
            if self.is_ending:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the next receive detects the end
        waiting = selectors.EVENT_WRITE if self._out else 0
        self._selector.modify(self._sock, selectors.EVENT_READ | waiting, self)

    def close(self) -> None:
        """Closes the connection immediately."""
        if not self.is_closed:
            self.is_closed = True
            self._selector.unregister(self._sock)
            self._sock.close()


MAX_PENDING = 10_000  # operations, far more than programs have
DEADLOCK_SECONDS = 10.0  # how long members must wait for each other before this is an error
REPORTED_SECONDS = 20.0  # after which a waiting member is notified of the missing members


class Answer(NamedTuple):
    """A message for a member."""

    rank: int
    message: Message


@dataclasses.dataclass(eq=False)
class PendingOperation:
    """One use of a name: the members that have arrived, and the failure if there was one.

    Attributes:
      name: name of the operation.
      ranks: the members that it waits for.
      tickets: by rank, the member's id of its request.
      values: by rank.
      deadline: the shortest deadline of the waiting members, in seconds.
      expires: the time at which that deadline is over.
      failure: why it failed, for members that arrive later; empty while it is open.
      locations: by rank, the line of the program at which the member waits; only for members whose main thread waits.
      began: when the first member arrived.
      is_reported: whether the waiting members have been notified of the missing ones.
      is_misuse: whether it failed because the programs of the ranks make different calls.
      deadlocked_since: time at which a deadlock was detected, see `_deadlocked`; inf if there is none.
    """

    name: str
    ranks: Sequence[int]
    tickets: dict[int, int] = dataclasses.field(default_factory=dict)
    values: dict[int, Json] = dataclasses.field(default_factory=dict)
    deadline: float = math.inf
    expires: float = math.inf
    failure: str = ""
    locations: dict[int, str] = dataclasses.field(default_factory=dict)
    began: float = math.inf
    is_reported: bool = False
    is_misuse: bool = False
    deadlocked_since: float = math.inf

    def missing(self) -> list[int]:
        """Returns the members that have not arrived."""
        return [rank for rank in self.ranks if rank not in self.tickets]

    def fail(self, failure: str, is_misuse: bool = False) -> Iterator[Answer]:
        """Fails the operation for all waiting members; those that arrive later get the same outcome."""
        self.failure, self.expires, self.is_misuse = failure, math.inf, is_misuse
        for rank, ticket in self.tickets.items():
            yield Answer(rank, _failed(ticket, failure, is_misuse))
        self.values.clear()


class PendingOperations:
    """All pending operations of a job's group and its subgroups.

    A member's value goes to the oldest pending operation of these ranks and that name at which the member has not
    arrived yet.

    Args:
      size: number of members of the job.
      noun: name of a member in messages.
      describe_absence: returns additional text about missing members.
    """

    def __init__(
        self, size: int, noun: str = "rank", describe_absence: Callable[[list[int]], str] = lambda missing: ""
    ):
        self._size = size
        self._noun = noun
        self._describe_absence = describe_absence
        self._rounds: dict[tuple[Sequence[int], str], list[PendingOperation]] = {}
        self._departed: dict[int, str] = {}  # why members take part in no more operations, in the order of their ends
        self._absent: set[int] = set()  # lost members without which operations complete
        self._misuse = ""  # why some members will never join

    def add(
        self,
        rank: int,
        ticket: int,
        name: str,
        value: Json,
        deadline: float,
        now: float,
        location: str = "",
        ranks: Sequence[int] | None = None,
    ) -> list[Answer]:
        """Records a member's value and returns the messages to send.

        Args:
          rank: rank of the member.
          ticket: the member's id of its request.
          name: name of the operation.
          value: the member's value.
          deadline: seconds that the member waits.
          now: current time.
          location: line of the program at which the member's main thread waits; empty if another thread waits.
          ranks: the members that the operation waits for, in order; None for all.
        """
        key = (range(self._size) if ranks is None else ranks, name)
        rounds = self._rounds.setdefault(key, [])
        entry = next((operation for operation in rounds if rank not in operation.tickets), None)
        if entry is None:
            if sum(map(len, self._rounds.values())) >= MAX_PENDING:
                raise BadMessage(f"a gather while {MAX_PENDING} are pending")
            rounds.append(entry := PendingOperation(name, key[0]))
        entry.tickets[rank] = ticket
        entry.began = min(entry.began, now)
        if location:
            entry.locations[rank] = location
        answers: list[Answer] = []
        if entry.failure:
            answers = [Answer(rank, _failed(ticket, entry.failure, entry.is_misuse))]
        else:
            entry.values[rank] = value
            if now + deadline < entry.expires:
                entry.deadline, entry.expires = deadline, now + deadline
            answers = self._outcome(entry)
        self._remove_completed(key)
        self._update_deadlocks(now)
        return answers

    def expire(self, now: float) -> list[Answer]:
        """Fails the operations whose deadline is over, and those that wait for each other."""
        answers: list[Answer] = []
        for entry in self._open():
            if entry.expires <= now:
                missing = self._missing(entry)
                names = name_ranks(missing, self._noun)
                failure = f"{names} did not reach '{entry.name}' within {entry.deadline:g} s{self._describe_absence(missing)}."
                answers += entry.fail(failure)
        self._update_deadlocks(now)
        deadlocked = [entry for entry in self._open() if entry.deadlocked_since + DEADLOCK_SECONDS <= now]
        return answers + (self._fail_deadlock(deadlocked) if deadlocked else [])

    def overdue_notices(self, now: float) -> list[Answer]:
        """Returns, once per operation, messages that notify long-waiting members of the missing ones."""
        overdue = [
            operation
            for operation in self._open()
            if not operation.is_reported and operation.began + REPORTED_SECONDS <= now
        ]
        answers = []
        for entry in overdue:
            entry.is_reported = True
            missing = name_ranks(self._missing(entry), self._noun)
            answers += [
                Answer(rank, {"type": "waiting", "name": entry.name, "missing": missing, "place": location})
                for rank, location in entry.locations.items()
            ]
        return answers

    def next_expiry(self) -> float:
        """Returns when the next deadline is over."""
        return min((entry.expires for entry in self._open()), default=math.inf)

    def _update_deadlocks(self, now: float) -> None:
        deadlocked = self._deadlocked()
        for entry in self._open():
            entry.deadlocked_since = min(entry.deadlocked_since, now) if entry in deadlocked else math.inf

    def _deadlocked(self) -> Sequence[PendingOperation]:
        """Returns the operations that wait for each other in a cycle, or for operations in a cycle.

        Only main threads are considered: another thread of a member may still arrive.
        """
        waiting = {rank: entry for entry in self._open() for rank in entry.locations}  # of main threads
        deadlocked: Sequence[PendingOperation] = list(dict.fromkeys(waiting.values()))
        while True:
            remaining = [
                entry for entry in deadlocked if any(waiting.get(rank) in deadlocked for rank in self._missing(entry))
            ]
            if len(remaining) == len(deadlocked):
                return deadlocked
            deadlocked = remaining

    def _fail_deadlock(self, deadlocked: Sequence[PendingOperation]) -> list[Answer]:
        waiting = {rank: (entry, location) for entry in deadlocked for rank, location in entry.locations.items()}
        locations = "; ".join(
            f"{self._noun} {rank} in '{entry.name}'{self._among(entry)} at {location}"
            for rank, (entry, location) in sorted(waiting.items())
        )
        failure = (
            f"Every {self._noun} must make the same calls, in the same order. Received: each waits for another one: "
            f"{locations}. Do not make them conditional on the {self._noun}."
        )
        return [answer for entry in deadlocked for answer in entry.fail(failure, is_misuse=True)]

    def _among(self, entry: PendingOperation) -> str:
        is_of_all = len(entry.ranks) == self._size
        return "" if is_of_all else f" of {name_ranks(list(entry.ranks), self._noun)}"

    def fail_all(self, misuse: str) -> list[Answer]:
        """Fails all current and later operations, because some members can never join."""
        self._misuse = misuse
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def member_left(self, rank: int, description: str) -> list[Answer]:
        """Records that a member left without an error, and fails the operations that still need it."""
        self._departed[rank] = f"{self._noun} {rank} {description}"
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def member_lost(self, rank: int, loss: str) -> list[Answer]:
        """Records the loss of a member, and fails its operations: those of a subgroup without it continue."""
        self._departed[rank] = loss
        pending = [entry for entry in self._open() if rank in entry.ranks]
        return [a for entry in pending for a in entry.fail(f"'{entry.name}' cannot complete: {loss}.")]

    def complete_without(self, rank: int) -> list[Answer]:
        """Records the loss of a member without which operations complete, now and later; its value is None."""
        self._absent.add(rank)
        answers = [answer for entry in self._open() for answer in self._outcome(entry)]
        for key in list(self._rounds):
            self._remove_completed(key)
        return answers

    def _remove_completed(self, key: tuple[Sequence[int], str]) -> None:
        """Removes the operations of these ranks and this name at which all members have arrived."""
        self._rounds[key] = [entry for entry in self._rounds[key] if self._missing(entry)]
        if not self._rounds[key]:
            del self._rounds[key]

    def _missing(self, entry: PendingOperation) -> list[int]:
        return [rank for rank in entry.missing() if rank not in self._absent]

    def _open(self) -> Iterable[PendingOperation]:
        return [entry for rounds in self._rounds.values() for entry in rounds if not entry.failure]

    def _outcome(self, entry: PendingOperation) -> list[Answer]:
        missing = self._missing(entry)
        if not missing:
            values = [entry.values.get(rank) for rank in entry.ranks]
            return [
                Answer(rank, {"type": "values", "ticket": ticket, "values": values})
                for rank, ticket in entry.tickets.items()
            ]
        if self._misuse:
            return list(entry.fail(self._misuse, is_misuse=True))
        reason = next((reason for rank, reason in self._departed.items() if rank in missing), "")
        return list(entry.fail(f"'{entry.name}' cannot complete: {reason}.")) if reason else []


def _failed(ticket: int, failure: str, is_misuse: bool = False) -> Message:
    return {"type": "failed", "ticket": ticket, "failure": failure, "misuse": is_misuse}


LOST_AFTER_SECONDS = 20.0
MAX_UNREAD = 64 * LIMIT  # bytes that a member may leave unread
PAUSE_SECONDS = 1.0  # without accepting connections, when this process has no resources for them
CLOSE_SECONDS = 2.0  # for the last messages to be delivered when the server closes


class Server:
    """Serves a group on a listening socket until `close`.

    Attributes:
      address: `host:port` that it listens on.
      size: number of members.
      loss: the first member that was lost, or None.
      tolerated: members whose losses are tolerated, see `Group.tolerate_losses`.
      departed: those of them that were lost.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        size: int,
        token: str,
        noun: str = "rank",
        addresses: Sequence[str] = (),
        heartbeat: float = 1.0,
        lost_after: float = LOST_AFTER_SECONDS,
    ):
        """Starts serving.

        Args:
          listener: a listening socket; the server closes it.
          size: number of members.
          token: token that members must present.
          noun: name of a member in messages.
          addresses: expected address of each member, by rank, for messages about members that never connected; empty if
            unknown.
          heartbeat: seconds between two heartbeats, in both directions.
          lost_after: seconds without a heartbeat after which a member is lost. Must be longer than an engine can keep
            all threads of a process from running, as some do while they start. Once a member reports a suspicion (its
            engine has failed), three heartbeats are enough.
        """
        self.address = join_address(*listener.getsockname()[:2])
        self.loss: LostMember | None = None
        self._losses: list[LostMember] = []
        self.tolerated: frozenset[int] = frozenset()
        self.departed: frozenset[int] = frozenset()
        self.size = size
        self._token, self._noun = token, noun
        self._nonce = nonce()  # for what members derive from the token, which other groups may share
        self._log = LimitedLog(logging.getLogger("tfdist.coordination"))
        self._addresses = addresses
        self._heartbeat, self._lost_after = heartbeat, lost_after
        self._rounds = PendingOperations(size, noun, self._describe_absence)
        self._members: dict[int, Connection] = {}
        self._joined: dict[int, str] = {}  # by rank, pid and host, including former members
        self._listener = listener
        self._wake_sender, self._wake_receiver = socket.socketpair()  # writing to the first one wakes the thread
        self._close_reason = ""
        self._paused_until = 0.0  # no connections are accepted before
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"{noun}-group-server", daemon=True)
        self._thread.start()

    def absent(self) -> list[int]:
        """Returns the members that never connected."""
        return [rank for rank in range(self.size) if rank not in self._joined]

    def close(self, reason: str = "the group is closed") -> None:
        """Notifies the members that the group is closed, and joins the thread. May be called repeatedly."""
        if not self._close_reason:
            self._close_reason = reason
            with contextlib.suppress(OSError):  # the thread may have ended by an error
                self._wake_sender.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
            self._send_goodbyes()
        finally:
            for connection in self._connections():
                connection.close()
            self._log.summarize(now=True)
            self._selector.close()
            for sock in (self._listener, self._wake_sender, self._wake_receiver):
                sock.close()

    def _serve(self) -> None:
        last = last_beat = time.monotonic()
        while not self._close_reason:
            until = min(last_beat + self._heartbeat, self._rounds.next_expiry())
            for key, mask in self._selector.select(max(0.0, until - last)):
                self._handle_event(key, mask)
            now = time.monotonic()
            if now - last > self._heartbeat + 1.0:  # this process was suspended or starved, not the members
                for connection in self._connections():
                    connection.last_received += now - last
                    connection.accept_time += now - last
            last = now
            self._send(self._rounds.expire(now))
            self._send(self._rounds.overdue_notices(now))
            if now >= last_beat + self._heartbeat:
                last_beat = now
                self._beat(now)
            if self._paused_until and now >= self._paused_until:
                self._paused_until = 0.0
                self._selector.register(self._listener, selectors.EVENT_READ)

    def _handle_event(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, Connection):
            try:
                if mask & selectors.EVENT_WRITE:
                    key.data.flush()
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
            except Exception as error:  # it costs this connection, not the thread that serves all of them
                self._log.error(f"Dropped a connection from {key.data.peer}, which could not be served", error)
                self._drop(key.data, f"it could not be served ({type(error).__name__}: {error})")

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError as error:
            if error.errno in NO_RESOURCES:
                self._log.warning(f"No connections to the group are accepted for {PAUSE_SECONDS:g} s: {error}")
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + PAUSE_SECONDS
            return  # otherwise the client has disconnected
        unauthenticated = [connection for connection in self._connections() if connection.rank is None]
        if len(unauthenticated) >= MAX_UNAUTHENTICATED:  # a member sends its hello immediately
            min(unauthenticated, key=lambda connection: connection.accept_time).close()
        try:
            Connection(sock, peer[0], self._selector)
        except Exception as error:  # it costs this connection, as one that is reset at once
            self._log.error(f"Dropped a connection from {peer[0]}, which could not be served", error)
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
                self._refuse(connection, WRONG_TOKEN, sealed=False)
            else:
                self._drop(connection, f"it sent {error}")
        except BadMessage as error:
            self._log.warning(f"Dropped a connection from {connection.peer}, which sent {error}")
            self._drop(connection, f"it sent {error}")

    def _handle(self, connection: Connection, message: Message) -> None:
        if connection.is_ending:
            return
        rank = connection.rank
        if rank is None:
            self._handle_unauthenticated(connection, message)
        elif message["type"] == "gather":
            ticket, name, value, location = take(message, ticket=int, name=str, value=object, place=str)
            deadline = deadline_of(message)
            ranks, now = ranks_of(message, rank, self.size), time.monotonic()
            self._send(self._rounds.add(rank, ticket, name, value, deadline, now, location, ranks))
        elif message["type"] == "publish":
            topic, value = take(message, topic=str, value=object)
            ranks = ranks_of(message, rank, self.size)
            published = {"type": "published", "ranks": ranks, "topic": topic, "value": value}
            self._send([Answer(member, published) for member in ranks or self._members])
        elif message["type"] == "tolerate":
            self.tolerated |= {*(ranks_of(message, rank, self.size) or range(self.size))} - {rank}
        elif message["type"] == "doubt":
            self._lost_after = min(self._lost_after, DOUBTED_BEATS * self._heartbeat)
        elif message["type"] == "goodbye":
            (reason,) = take(message, reason=str)
            self._goodbye(connection, rank, exit_code_of(message), reason)

    def _handle_unauthenticated(self, connection: Connection, message: Message) -> None:
        if connection.hello:  # and this message is sealed, so the sender knows the token
            self._admit(connection, connection.hello)
        elif refusal := version_refusal(message):
            self._refuse(connection, refusal)
        else:
            connection.challenge(message, self._token)

    def _refuse(self, connection: Connection, refusal: str, *, sealed: bool = True) -> None:
        self._log.warning(f"Refused a connection from {connection.peer}. {refusal}")
        connection.refuse(refusal, sealed=sealed)

    def _admit(self, connection: Connection, hello: Message) -> None:
        if refusal := join_refusal(hello, self.size, self._noun, self._joined):
            if hello["rank"] in self._joined and self.absent():  # another rank, that of this process, is missing
                connection.refuse(refusal)
                self._send(self._rounds.fail_all(refusal))
            else:
                self._refuse(connection, refusal)
            return
        rank: int = hello["rank"]
        connection.admit(rank)
        self._joined[rank] = f"pid {hello['pid']} on {hello['host']}"
        self._members[rank] = connection
        seconds = {"heartbeat": self._heartbeat, "lost_after": self._lost_after}
        connection.send({"type": "welcome", "nonce": self._nonce} | seconds)
        for loss in self._losses:
            connection.send(_lost_message(loss))

    def _goodbye(self, connection: Connection, rank: int, code: int, reason: str) -> None:
        if not is_planned(code):
            description = f"ended with {exceptions.describe(code)}" + (f": {reason}" if reason else "")
            self._drop(connection, description, code)
        else:
            del self._members[rank]
            connection.end()
            description = exceptions.describe(code) if code else "code 0"
            self._send(self._rounds.member_left(rank, f"has left with {description}"))

    def _drop(self, connection: Connection, reason: str, code: int | None = None) -> None:
        """Closes a connection; if it is a member's, reports to all members that this one is lost."""
        rank = connection.rank
        if rank is not None and rank in self._members:
            loss, is_tolerated = LostMember(rank, reason, code, self._noun), rank in self.tolerated
            for member in self._members.values():
                member.send(_lost_message(loss) | {"tolerated": is_tolerated})
            if is_tolerated:
                self.departed |= {rank}
                self._send(self._rounds.complete_without(rank))
            else:
                self.loss = self.loss or loss
                self._losses.append(loss)
                self._send(self._rounds.member_lost(rank, str(loss)))
            del self._members[rank]
        connection.end()

    def _beat(self, now: float) -> None:
        self._log.summarize()
        for connection in self._connections():
            if connection.is_ending or connection.rank is None:
                if now - (connection.last_received if connection.is_ending else connection.accept_time) > HELLO_SECONDS:
                    connection.close()
            elif connection.unread > MAX_UNREAD:
                self._drop(connection, f"it left more than {MAX_UNREAD} bytes unread")
            elif now - connection.last_received > self._lost_after + connection.lines.allowance:
                self._drop(connection, silence(self._lost_after))
            else:
                connection.send({"type": "beat"})

    def _send(self, answers: list[Answer]) -> None:
        # Rank 0 last: its client may run in this process, and then enter an engine call that waits for the other ranks and
        # blocks all threads, including this one (tf.distribute connects this way).
        for rank, message in sorted(answers, key=lambda answer: -answer.rank):
            if rank in self._members:
                self._members[rank].send(message)

    def _describe_absence(self, missing: list[int]) -> str:
        never = [rank for rank in missing if rank not in self._joined]
        if not never:
            return ""
        members = [f"{rank} at {self._addresses[rank]}" if self._addresses else str(rank) for rank in never]
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


def _lost_message(loss: LostMember) -> Message:
    return {"type": "lost", "rank": loss.rank, "reason": loss.reason, "code": loss.code}
