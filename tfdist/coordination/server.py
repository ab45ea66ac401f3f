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
    encode,
    join_refusal,
    nonce,
    take,
    take_code,
    take_deadline,
    take_ranks,
    version_refusal,
)
from tfdist.errors import exceptions

_CHUNK = 1 << 16


class Connection:
    """A non-blocking connection that owns its socket, registered with a selector, with this object as the key's data.

    Attributes:
      rank: the member's rank, after it has been welcomed.
      hello: the message that has been answered by a challenge; None before.
      accepted: `time.monotonic()` when the connection was accepted.
      heard: `time.monotonic()` when the last message was received, complete and verified, not counting those after `end`.
      lines: splits the received data into messages.
      peer: address of the other end, for logs.
      ending: whether the last message has been queued; data received afterwards is discarded.
      closed: whether the socket is closed.
    """

    def __init__(self, sock: socket.socket, peer: str, selector: selectors.BaseSelector):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank: int | None = None
        self.hello: Message | None = None
        self._session: Session | None = None
        self.accepted = self.heard = time.monotonic()
        self.lines = MessageReader(LIMIT_BEFORE_HELLO)
        self.peer = peer
        self.ending = False
        self.closed = False
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
        if not self.ending:
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
        """Sends a refusal and ends; without a seal to an end that does not know the token."""
        if not sealed:
            self._session = None
        self.send({"type": "refused", "reason": reason})
        self.end()

    def admit(self, rank: int) -> None:
        """Sets the rank of the member at the other end."""
        self.rank, self.lines.limit = rank, LIMIT + OVERHEAD

    def end(self) -> None:
        """Sends the queued data, and closes once the other end has closed too.

        Closing at once would reset the connection if a message is still arriving, and the last message sent could be
        lost.
        """
        self.ending = True
        self.flush()

    def flush(self) -> None:
        """Sends as much of the queued data as possible without blocking."""
        if self.closed:
            return
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
            if self.ending:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the next receive detects the end
        waiting = selectors.EVENT_WRITE if self._out else 0
        self._selector.modify(self._sock, selectors.EVENT_READ | waiting, self)

    def close(self) -> None:
        """Closes the connection immediately."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._sock)
            self._sock.close()


MOST_PENDING = 10_000  # operations, far more than programs have
STANDSTILL_SECONDS = 10.0  # how long members must wait for each other before this is an error
REPORTED_SECONDS = 20.0  # after which a waiting member is notified of the missing members


class Answer(NamedTuple):
    """A message for a member."""

    rank: int
    message: Message


@dataclasses.dataclass(eq=False)
class PendingOperation:
    """One use of a name: who has arrived, and the failure if there was one.

    Attributes:
      name: name of the operation.
      ranks: the members that it waits for.
      tickets: by rank, the id under which the member knows its request.
      values: by rank.
      deadline: the shortest deadline of the waiting members, in seconds.
      expires: the time at which that deadline is over.
      failure: why it failed, for members that arrive later; empty while it is open.
      places: by rank, where in its program the member waits; only for members whose main thread does.
      began: when the first member arrived.
      is_reported: whether the waiting members have been notified of the missing ones.
      is_misuse: whether it failed because the programs of the ranks make different calls.
      stuck_since: since when it is known to be stuck, see `_stuck`; inf if it is not.
    """

    name: str
    ranks: Sequence[int]
    tickets: dict[int, int] = dataclasses.field(default_factory=dict)
    values: dict[int, Json] = dataclasses.field(default_factory=dict)
    deadline: float = math.inf
    expires: float = math.inf
    failure: str = ""
    places: dict[int, str] = dataclasses.field(default_factory=dict)
    began: float = math.inf
    is_reported: bool = False
    is_misuse: bool = False
    stuck_since: float = math.inf

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
      absence: returns additional text about missing members.
    """

    def __init__(self, size: int, noun: str = "rank", absence: Callable[[list[int]], str] = lambda missing: ""):
        self._size = size
        self._noun = noun
        self._absence = absence
        self._rounds: dict[tuple[Sequence[int], str], list[PendingOperation]] = {}
        self._gone: dict[int, str] = {}  # why members can arrive nowhere any more, in the order of their ends
        self._misuse = ""  # why some members will never join

    def add(
        self,
        rank: int,
        ticket: int,
        name: str,
        value: Json,
        deadline: float,
        now: float,
        place: str = "",
        ranks: Sequence[int] | None = None,
    ) -> list[Answer]:
        """Records a member's value and returns the messages to send.

        Args:
          rank: rank of the member.
          ticket: id under which the member knows its request.
          name: name of the operation.
          value: the member's value.
          deadline: seconds that the member waits.
          now: current time.
          place: where in its program the member's main thread waits; empty if another thread does.
          ranks: the members that the operation waits for, in order; None for all.
        """
        key = (range(self._size) if ranks is None else ranks, name)
        rounds = self._rounds.setdefault(key, [])
        entry = next((one for one in rounds if rank not in one.tickets), None)
        if entry is None:
            if sum(map(len, self._rounds.values())) >= MOST_PENDING:
                raise BadMessage(f"a gather while {MOST_PENDING} are pending")
            rounds.append(entry := PendingOperation(name, key[0]))
        entry.tickets[rank] = ticket
        entry.began = min(entry.began, now)
        if place:
            entry.places[rank] = place
        answers: list[Answer] = []
        if entry.failure:
            answers = [Answer(rank, _failed(ticket, entry.failure, entry.is_misuse))]
        else:
            entry.values[rank] = value
            if now + deadline < entry.expires:
                entry.deadline, entry.expires = deadline, now + deadline
            answers = self._outcome(entry)
        if len(entry.tickets) == len(entry.ranks):
            rounds.remove(entry)
        if not rounds:
            del self._rounds[key]
        self._note_stuck(now)
        return answers

    def expire(self, now: float) -> list[Answer]:
        """Fails the operations whose deadline is over, and those that wait for each other."""
        answers: list[Answer] = []
        for entry in self._open():
            if entry.expires <= now:
                missing = entry.missing()
                names = name_ranks(missing, self._noun)
                failure = f"{names} did not reach '{entry.name}' within {entry.deadline:g} s{self._absence(missing)}."
                answers += entry.fail(failure)
        self._note_stuck(now)
        stuck = [entry for entry in self._open() if entry.stuck_since + STANDSTILL_SECONDS <= now]
        return answers + (self._end_standstill(stuck) if stuck else [])

    def late(self, now: float) -> list[Answer]:
        """Returns, once per operation, messages that notify long-waiting members of the missing ones."""
        found = [one for one in self._open() if not one.is_reported and one.began + REPORTED_SECONDS <= now]
        answers = []
        for entry in found:
            entry.is_reported = True
            missing = name_ranks(entry.missing(), self._noun)
            answers += [
                Answer(rank, {"type": "waiting", "name": entry.name, "missing": missing, "place": place})
                for rank, place in entry.places.items()
            ]
        return answers

    def next_expiry(self) -> float:
        """Returns when the next deadline is over."""
        return min((entry.expires for entry in self._open()), default=math.inf)

    def _note_stuck(self, now: float) -> None:
        stuck = self._stuck()
        for entry in self._open():
            entry.stuck_since = min(entry.stuck_since, now) if entry in stuck else math.inf

    def _stuck(self) -> Sequence[PendingOperation]:
        """Returns the operations that wait for each other in a cycle, or for operations in a cycle.

        One such operation waits for a member whose main thread waits in another one. Other threads of that member are
        not known to be stuck.
        """
        waiting = {rank: entry for entry in self._open() for rank in entry.places}  # where main threads wait
        stuck: Sequence[PendingOperation] = list(dict.fromkeys(waiting.values()))
        while True:
            still = [entry for entry in stuck if any(waiting.get(rank) in stuck for rank in entry.missing())]
            if len(still) == len(stuck):
                return stuck
            stuck = still

    def _end_standstill(self, stuck: Sequence[PendingOperation]) -> list[Answer]:
        where = {rank: (entry, place) for entry in stuck for rank, place in entry.places.items()}
        places = "; ".join(
            f"{self._noun} {rank} in '{entry.name}'{self._among(entry)} at {place}"
            for rank, (entry, place) in sorted(where.items())
        )
        failure = (
            f"Every {self._noun} must make the same calls, in the same order. Received: each waits for another one: "
            f"{places}. Do not make them conditional on the {self._noun}."
        )
        return [answer for entry in stuck for answer in entry.fail(failure, is_misuse=True)]

    def _among(self, entry: PendingOperation) -> str:
        is_of_all = len(entry.ranks) == self._size
        return "" if is_of_all else f" of {name_ranks(list(entry.ranks), self._noun)}"

    def fail_all(self, misuse: str) -> list[Answer]:
        """Fails all operations, and later ones, as the job was started such that some members will never join."""
        self._misuse = misuse
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def member_left(self, rank: int, how: str) -> list[Answer]:
        """Records that a member left without an error, and fails the operations that still need it."""
        self._gone[rank] = f"{self._noun} {rank} {how}"
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def member_lost(self, rank: int, loss: str) -> list[Answer]:
        """Records the loss of a member, and fails its operations: those of a subgroup without it continue."""
        self._gone[rank] = loss
        pending = [entry for entry in self._open() if rank in entry.ranks]
        return [a for entry in pending for a in entry.fail(f"'{entry.name}' cannot complete: {loss}.")]

    def _open(self) -> Iterable[PendingOperation]:
        return [entry for rounds in self._rounds.values() for entry in rounds if not entry.failure]

    def _outcome(self, entry: PendingOperation) -> list[Answer]:
        missing = entry.missing()
        if not missing:
            values = [entry.values[rank] for rank in entry.ranks]
            return [
                Answer(rank, {"type": "values", "ticket": ticket, "values": values})
                for rank, ticket in entry.tickets.items()
            ]
        if self._misuse:
            return list(entry.fail(self._misuse, is_misuse=True))
        gone = next((how for rank, how in self._gone.items() if rank in missing), "")
        return list(entry.fail(f"'{entry.name}' cannot complete: {gone}.")) if gone else []


def _failed(ticket: int, failure: str, is_misuse: bool = False) -> Message:
    return {"type": "failed", "ticket": ticket, "failure": failure, "misuse": is_misuse}


LOST_AFTER_SECONDS = 20.0
MOST_UNREAD = 64 * LIMIT  # bytes that a member may leave unread
PAUSE_SECONDS = 1.0  # without accepting connections, when this process has no resources for them
FAREWELL_SECONDS = 2.0  # for the last messages to be delivered when the server closes


class Server:
    """Serves a group on a listening socket until `close`.

    Attributes:
      address: `host:port` that it listens on.
      size: number of members.
      loss: the first member that was lost, or None.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        size: int,
        token: str,
        noun: str = "rank",
        places: Sequence[str] = (),
        heartbeat: float = 1.0,
        lost_after: float = LOST_AFTER_SECONDS,
    ):
        """Starts serving.

        Args:
          listener: a listening socket; the server closes it.
          size: number of members.
          token: token that members must present.
          noun: what a member is called in messages.
          places: expected location of each member, by rank, for messages about members that never connected; empty if
            unknown.
          heartbeat: seconds between two heartbeats, in both directions.
          lost_after: seconds without a heartbeat after which a member is lost. Must be longer than an engine can keep
            all threads of a process from running, as some do while they start. Once a member reports a suspicion (its
            engine has failed), three heartbeats are enough.
        """
        self.address = join_address(*listener.getsockname()[:2])
        self.loss: LostMember | None = None
        self._losses: list[LostMember] = []
        self.size = size
        self._token, self._noun = token, noun
        self._nonce = nonce()  # for what members derive from the token, which other groups may share
        self._log = LimitedLog(logging.getLogger("tfdist.coordination"))
        self._places = places
        self._heartbeat, self._lost_after = heartbeat, lost_after
        self._rounds = PendingOperations(size, noun, self._absence)
        self._members: dict[int, Connection] = {}
        self._came: dict[int, str] = {}  # by rank, pid and host, including members that are gone
        self._listener = listener
        self._wake_sender, self._wake_receiver = socket.socketpair()  # writing to the first one wakes the thread
        self._farewell = ""
        self._paused_until = 0.0  # no connections are accepted before
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"{noun}-group-server", daemon=True)
        self._thread.start()

    def absent(self) -> list[int]:
        """Returns the members that never connected."""
        return [rank for rank in range(self.size) if rank not in self._came]

    def close(self, reason: str = "the group is closed") -> None:
        """Notifies the members that the group is closed, and joins the thread. May be called repeatedly."""
        if not self._farewell:
            self._farewell = reason
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
        last = beaten = time.monotonic()
        while not self._farewell:
            until = min(beaten + self._heartbeat, self._rounds.next_expiry())
            for key, mask in self._selector.select(max(0.0, until - last)):
                self._handle_event(key, mask)
            now = time.monotonic()
            if now - last > self._heartbeat + 1.0:  # this process was suspended or starved, not the members
                for connection in self._connections():
                    connection.heard += now - last
                    connection.accepted += now - last
            last = now
            self._send(self._rounds.expire(now))
            self._send(self._rounds.late(now))
            if now >= beaten + self._heartbeat:
                beaten = now
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
            return  # otherwise the client is gone again
        unauthenticated = [connection for connection in self._connections() if connection.rank is None]
        if len(unauthenticated) >= MAX_UNAUTHENTICATED:  # a member says hello at once
            min(unauthenticated, key=lambda connection: connection.accepted).close()
        try:
            Connection(sock, peer[0], self._selector)
        except Exception as error:  # it costs this connection, as one that is reset at once
            self._log.error(f"Dropped a connection from {peer[0]}, which could not be served", error)
            sock.close()

    def _read(self, connection: Connection) -> None:
        data = connection.receive()
        if connection.ending:
            if data is None:
                connection.close()
            return
        if data is None:
            self._drop(connection, NO_GOODBYE)
            return
        try:
            for message in connection.lines.feed(data):
                connection.heard = time.monotonic()
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
        if connection.ending:
            return
        rank = connection.rank
        if rank is None:
            self._handle_unauthenticated(connection, message)
        elif message["type"] == "gather":
            ticket, name, value, place = take(message, ticket=int, name=str, value=object, place=str)
            deadline = take_deadline(message)
            ranks, now = take_ranks(message, rank, self.size), time.monotonic()
            self._send(self._rounds.add(rank, ticket, name, value, deadline, now, place, ranks))
        elif message["type"] == "publish":
            topic, value = take(message, topic=str, value=object)
            ranks = take_ranks(message, rank, self.size)
            published = {"type": "published", "ranks": ranks, "topic": topic, "value": value}
            self._send([Answer(member, published) for member in ranks or self._members])
        elif message["type"] == "doubt":
            self._lost_after = min(self._lost_after, DOUBTED_BEATS * self._heartbeat)
        elif message["type"] == "goodbye":
            (reason,) = take(message, reason=str)
            self._goodbye(connection, rank, take_code(message), reason)

    def _handle_unauthenticated(self, connection: Connection, message: Message) -> None:
        if connection.hello:  # and this message is sealed: whoever sent it knows the token
            self._admit(connection, connection.hello)
        elif refusal := version_refusal(message):
            self._refuse(connection, refusal)
        else:
            connection.challenge(message, self._token)

    def _refuse(self, connection: Connection, refusal: str, *, sealed: bool = True) -> None:
        self._log.warning(f"Refused a connection from {connection.peer}. {refusal}")
        connection.refuse(refusal, sealed=sealed)

    def _admit(self, connection: Connection, hello: Message) -> None:
        if refusal := join_refusal(hello, self.size, self._noun, self._came):
            if hello["rank"] in self._came and self.absent():  # nobody has the rank that this process should have
                connection.refuse(refusal)
                self._send(self._rounds.fail_all(refusal))
            else:
                self._refuse(connection, refusal)
            return
        rank: int = hello["rank"]
        connection.admit(rank)
        self._came[rank] = f"pid {hello['pid']} on {hello['host']}"
        self._members[rank] = connection
        seconds = {"heartbeat": self._heartbeat, "lost_after": self._lost_after}
        connection.send({"type": "welcome", "nonce": self._nonce} | seconds)
        for loss in self._losses:
            connection.send(_lost_message(loss))

    def _goodbye(self, connection: Connection, rank: int, code: int, reason: str) -> None:
        if not is_planned(code):
            ending = f"ended with {exceptions.describe(code)}" + (f": {reason}" if reason else "")
            self._drop(connection, ending, code)
        else:
            del self._members[rank]
            connection.end()
            how = exceptions.describe(code) if code else "code 0"
            self._send(self._rounds.member_left(rank, f"has left with {how}"))

    def _drop(self, connection: Connection, reason: str, code: int | None = None) -> None:
        """Closes a connection; if it is a member's, reports to all members that this one is lost."""
        rank = connection.rank
        if rank is not None and rank in self._members:
            loss = LostMember(rank, reason, code, self._noun)
            self.loss = self.loss or loss
            self._losses.append(loss)
            for member in self._members.values():
                member.send(_lost_message(loss))
            self._send(self._rounds.member_lost(rank, str(loss)))
            del self._members[rank]
        connection.end()

    def _beat(self, now: float) -> None:
        self._log.summarize()
        for connection in self._connections():
            if connection.ending or connection.rank is None:
                if now - (connection.heard if connection.ending else connection.accepted) > HELLO_SECONDS:
                    connection.close()
            elif connection.unread > MOST_UNREAD:
                self._drop(connection, f"it left more than {MOST_UNREAD} bytes unread")
            elif now - connection.heard > self._lost_after + connection.lines.allowance:
                self._drop(connection, silence(self._lost_after))
            else:
                connection.send({"type": "beat"})

    def _send(self, answers: list[Answer]) -> None:
        # Rank 0 last: its client may run in this very process and then enter an engine call that waits for the other
        # ranks while no other thread can run, including this one (tf.distribute connects this way).
        for rank, message in sorted(answers, key=lambda answer: -answer.rank):
            if rank in self._members:
                self._members[rank].send(message)

    def _absence(self, missing: list[int]) -> str:
        never = [rank for rank in missing if rank not in self._came]
        if not never:
            return ""
        where = [f"{rank} at {self._places[rank]}" if self._places else str(rank) for rank in never]
        return f" (never connected: {self._noun} {', '.join(where)})"

    def _connections(self) -> list[Connection]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, Connection)]

    def _send_goodbyes(self) -> None:
        for connection in self._connections():
            if connection.rank is None:  # it was never admitted
                connection.close()
            else:
                connection.send({"type": "closed", "reason": self._farewell})
                connection.end()
        end = time.monotonic() + FAREWELL_SECONDS
        while self._connections() and time.monotonic() < end:
            for key, mask in self._selector.select(0.05):
                if isinstance(key.data, Connection):
                    self._handle_event(key, mask)


def _lost_message(loss: LostMember) -> Message:
    return {"type": "lost", "rank": loss.rank, "reason": loss.reason, "code": loss.code}
