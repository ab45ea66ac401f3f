"""The server of a group: one thread, one selector."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from tfdist.coordination.addresses import NO_RESOURCES, join_address
from tfdist.coordination.authentication import WrongSealError, nonce
from tfdist.coordination.connection import Connection
from tfdist.coordination.goodbye import is_planned
from tfdist.coordination.group import NO_GOODBYE, LostMember, silence
from tfdist.coordination.handshake import HELLO_SECONDS, MAX_UNAUTHENTICATED, WRONG_TOKEN, Handshake, version_refusal
from tfdist.coordination.limited_log import LimitedLog
from tfdist.coordination.messages import (
    DOUBTED_BEATS,
    LIMIT,
    BadMessage,
    Message,
    take,
    take_code,
    take_deadline,
    take_ranks,
)
from tfdist.coordination.pending_operations import Answer, PendingOperations
from tfdist.errors import exit_codes

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
        self._handshake = Handshake(size, token, noun)
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
            connection.challenge(message, self._handshake.token)

    def _refuse(self, connection: Connection, refusal: str, *, sealed: bool = True) -> None:
        self._log.warning(f"Refused a connection from {connection.peer}. {refusal}")
        connection.refuse(refusal, sealed=sealed)

    def _admit(self, connection: Connection, hello: Message) -> None:
        if refusal := self._handshake.refusal(hello, self._came):
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
            ending = f"ended with {exit_codes.describe(code)}" + (f": {reason}" if reason else "")
            self._drop(connection, ending, code)
        else:
            del self._members[rank]
            connection.end()
            how = exit_codes.describe(code) if code else "code 0"
            self._send(self._rounds.member_left(rank, f"has left with {how}"))

    def _drop(self, connection: Connection, reason: str, code: int | None = None) -> None:
        """Closes a connection; if it is a member's, reports to all members that this one is lost."""
        rank = connection.rank
        if rank is not None and rank in self._members:
            loss = LostMember(rank, reason, code, self._handshake.noun)
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
        return f" (never connected: {self._handshake.noun} {', '.join(where)})"

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
