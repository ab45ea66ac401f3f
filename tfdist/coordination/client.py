"""A member of a group that is served by another process or thread."""

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from tfdist.coordination.connect import connect
from tfdist.coordination.group import NO_GOODBYE, Group, Json, Listener, Loss, name_member, silence
from tfdist.coordination.messages import DOUBTED_BEATS, LIMIT, VERSION, BadMessage, Message, encode, limited
from tfdist.coordination.publishing import Publications
from tfdist.errors import InputError, PeerLostError
from tfdist.process.stack_dumps import caller_location

PATIENCE_SECONDS = 2.0  # how much longer to wait for the server, after a deadline or a goodbye
_CHUNK = 1 << 16
_log = logging.getLogger("tfdist.coordination")


@dataclasses.dataclass(eq=False)
class _PendingGather:
    """A gather of this member that has not completed."""

    name: str
    answered: threading.Event = dataclasses.field(default_factory=threading.Event)
    values: list[Json] = dataclasses.field(default_factory=list)
    failure: str = ""
    is_misuse: bool = False


class RemoteGroup(Group):
    """A group whose members communicate through a `Server`.

    One thread receives messages and sends heartbeats.
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
        on_left: Callable[[str], None] = lambda how: None,
    ):
        """Connects to the server, retrying until it answers.

        Args:
          address: `host:port` of the server.
          rank: this member's rank.
          size: number of members.
          token: the group's token, which the server checks.
          timeout: seconds to wait for the connection.
          noun: what a member is called in messages.
          server_rank: the member, or `LAUNCHER`, that is reported as lost if the server dies.
          on_left: called with a description after this member has left; the process that serves the group closes the
            server in it.

        Raises:
          PeerLostError: the server did not answer in time.
          InputError: the server refused this member.
        """
        self.rank, self.size = rank, size
        self._noun, self._server_rank, self._on_left = noun, server_rank, on_left
        self._state = threading.Lock()  # guards the attributes below
        self._pending: dict[int, _PendingGather] = {}
        self._tickets = 0
        self._loss: Loss | None = None
        self._over = ""  # why no gather can complete any more
        self._callbacks: list[Callable[[Loss], None]] = []
        self._messengers: list[threading.Thread] = []
        self._left = False
        self._told = Publications(f"{noun}-{rank}-group-told")
        self._news = threading.Event()
        self._sending = threading.Lock()
        hello = {"type": "hello", "rank": rank, "size": size, "token": token, "version": VERSION}
        hello |= {"pid": os.getpid(), "host": socket.gethostname()}
        call = connect(address, hello, (size + 1) * LIMIT, timeout, name_member(server_rank, noun))
        self._sock, self._lines = call.sock, call.lines
        self._heartbeat, self._lost_after = float(call.welcome["heartbeat"]), float(call.welcome["lost_after"])
        self._sock.settimeout(self._lost_after)
        for message in call.following:
            self._handle(message)
        self._thread = threading.Thread(target=self._run, name=f"{noun}-{rank}-group-member", daemon=True)
        self._thread.start()

    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        """See base class."""
        ticket, question, line = self._ask(name, value, deadline)
        try:
            self._send(line)
            question.answered.wait(min(deadline + PATIENCE_SECONDS, threading.TIMEOUT_MAX))
        finally:
            with self._state:
                self._pending.pop(ticket, None)
        if not question.answered.is_set():
            server = name_member(self._server_rank, self._noun)
            raise PeerLostError(f"{server}, which serves the group, did not answer '{name}' within {deadline:g} s.")
        if question.failure:
            raise (InputError if question.is_misuse else PeerLostError)(question.failure)
        return question.values

    def tell(self, topic: str, value: Json) -> None:
        """See base class."""
        self._send(limited({"type": "tell", "topic": topic, "value": value}, topic))

    def on_told(self, topic: str, callback: Listener) -> None:
        """See base class."""
        self._told.listen(topic, callback)

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """See base class."""
        with self._state:
            self._callbacks.append(callback)
            if self._loss:
                self._tell_of(self._loss, callback)

    def lost(self, wait: float = 0.0) -> Loss | None:
        """See base class.

        Waiting implies a suspicion: the server is asked to detect a stopped member sooner.
        """
        if wait and not self._news.is_set():
            self._lost_after = min(self._lost_after, DOUBTED_BEATS * self._heartbeat)
            self._send(encode({"type": "doubt"}))
            self._news.wait(wait)
        return self._loss

    def leave(self, code: int = 0, reason: str = "") -> None:
        """See base class.

        All threads of the group have ended when this returns. A second goodbye is ignored.
        """
        with self._state:
            if self._left:
                return
            self._left, self.left_with = True, code
        self._finish("this process has left the group")  # first, as the server answers a goodbye by closing
        self._send(encode({"type": "goodbye", "code": code, "reason": reason[:1000]}))
        with contextlib.suppress(OSError):  # the server may be gone
            self._sock.shutdown(socket.SHUT_WR)
        _join(self._thread)
        if self._thread.is_alive():  # a stopped server does not close its side
            self._hang_up()
            _join(self._thread)
        for messenger in self._messengers:
            _join(messenger)
        self._told.close()
        self._sock.close()
        self._on_left(f"{name_member(self.rank, self._noun)} has left with code {code}")

    def _ask(self, name: str, value: Json, deadline: float) -> tuple[int, _PendingGather, bytes]:
        with self._state:
            if any(question.name == name for question in self._pending.values()):
                raise ValueError(f"A name of the group is used once at a time. Received: {name!r}, which is under way.")
            self._tickets += 1
            message = {"type": "gather", "ticket": self._tickets, "name": name, "value": value, "deadline": deadline}
            message["place"] = caller_location() if threading.current_thread() is threading.main_thread() else ""
            line = limited(message, name)
            if self._over:
                raise PeerLostError(f"'{name}' cannot complete: {self._over}.")
            question = self._pending[self._tickets] = _PendingGather(name)
            return self._tickets, question, line

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            self._hang_up()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            last = heard = beaten = time.monotonic()
            while True:
                ready = selector.select(max(0.0, beaten + self._heartbeat - last))
                if ready and not self._read():
                    return
                now = time.monotonic()
                if now - last > self._heartbeat + 1.0:  # this process was suspended or starved, not the server
                    heard += now - last
                heard = now if ready else heard
                last = now
                if now - heard > self._lost_after:
                    self._lose(silence(self._lost_after))
                    return
                if now >= beaten + self._heartbeat:
                    beaten = now
                    self._send(encode({"type": "beat"}))

    def _read(self) -> bool:
        """Handles the data that has arrived; returns whether the connection is still open."""
        try:
            data = self._sock.recv(_CHUNK)
            for message in self._lines.feed(data):
                self._handle(message)
        except (OSError, BadMessage) as error:
            self._lose(f"its connection failed ({error})")
            return False
        if not data:
            self._lose(NO_GOODBYE)
        return bool(data)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if kind == "lost":
            self._lose(message["reason"], message["rank"], message["code"])
        elif kind == "closed":
            self._finish(message["reason"])
        elif kind == "told":
            self._told.put(message["topic"], message["value"])
        elif kind == "waiting" and self._noun == "rank":  # a launcher may wait for others for as long as it needs
            name, missing, place = message["name"], message["missing"], message["place"]
            _log.warning("Rank %d waits for %s in '%s', called at %s.", self.rank, missing, name, place)
        elif kind in ("values", "failed"):
            with self._state:
                question = self._pending.get(message["ticket"])
            if question:
                question.values, question.failure = message.get("values", []), message.get("failure", "")
                question.is_misuse = message.get("misuse", False)
                question.answered.set()

    def _lose(self, reason: str, rank: int | None = None, code: int | None = None) -> None:
        """Reports the first loss, which by default is that of the server.

        A server whose connection closes after a goodbye of either side is not lost.
        """
        with self._state:
            if self._loss or (rank is None and self._over):
                return
            self._loss = loss = Loss(self._server_rank if rank is None else rank, reason, code, self._noun)
            for callback in self._callbacks:
                self._tell_of(loss, callback)
        self._news.set()
        self._finish(str(loss))

    def _finish(self, over: str) -> None:
        """Fails all pending and future gathers."""
        with self._state:
            self._over = self._over or over
            questions = [question for question in self._pending.values() if not question.answered.is_set()]
        for question in questions:
            question.failure = f"'{question.name}' cannot complete: {over}."
            question.answered.set()

    def _tell_of(self, loss: Loss, callback: Callable[[Loss], None]) -> None:
        messenger = threading.Thread(target=callback, args=(loss,), name="group-loss", daemon=True)
        self._messengers.append(messenger)
        messenger.start()

    def _send(self, line: bytes) -> None:
        try:
            with self._sending:
                self._sock.sendall(line)
        except OSError:  # the receiving thread detects the end of the connection and reports it
            self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join(PATIENCE_SECONDS)
