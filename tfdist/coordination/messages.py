"""The group's wire format, one JSON object per line; who may connect, by a token that is never sent.

A connection begins with a `hello` (rank, size, version, pid, host, nonce), which is answered by a `challenge` (nonce) or by
`refused`. From then on each message is sealed with the token (`tfdist.coordination.messages`). The process sends `join`,
which is answered by `welcome` (with the group's nonce) or `refused`. Members then send `gather`, `publish`, `doubt`, `beat` and
`goodbye`, the last one. The server answers a gather with `values` or `failed`, preceded by `waiting` if it takes long. It sends
`published` to all members, `beat`, `lost` and, last, `closed`. `gather`, `publish` and `published` have the `ranks` of a
subgroup, in order, or null for all members.
"""

import collections
import hashlib
import hmac
import json
import logging
import math
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.errors import InputError
from tfdist.errors.engine_errors import escaped

VERSION = 1  # of the protocol; other versions are refused with a message
LIMIT = 1 << 20  # maximum bytes per message
MIN_BYTES_PER_SECOND = 1 << 20  # rate at which the time of an incomplete message does not count as silence
DOUBTED_BEATS = 3  # missing heartbeats that count as a loss once an engine has reported a failure
LIMIT_BEFORE_HELLO = 1 << 12  # for senders that have not presented the token yet
MAX_DEADLINE = 1e9  # seconds; longer ones are sent as null

Message = dict[str, Any]


class BadMessage(ValueError):
    """The received data is not a valid message, or too large."""


def encode(message: Message) -> bytes:
    """Returns the line that encodes a message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def limited(message: Message, name: str) -> bytes:
    """Returns the line that encodes a message with a user's value.

    Args:
      message: the message.
      name: name of the operation or topic, for the error message.

    Raises:
      InputError: the line is too long.
    """
    line = encode(message)
    if len(line) > LIMIT:
        raise InputError(
            f"A message of the group must have at most {LIMIT} bytes. Received: {len(line)} for '{name}'. The group "
            "sends small values; write large ones to a file."
        )
    return line


def printable(text: str, limit: int) -> str:
    """Returns text from another program for a log or a terminal: cut, with control characters escaped."""
    return escaped(text[:limit])[:limit]


def take(message: Message, **kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """Returns the named fields of a message in the order of the arguments, after checking their types.

    Raises:
      BadMessage: a field is missing or has another type.
    """
    for name, kind in kinds.items():
        if name not in message or not isinstance(message[name], kind):
            raise BadMessage(f"a {message['type']!r} whose {name!r} is {message.get(name)!r:.80}")
    return tuple(message[name] for name in kinds)


def deadline_field(deadline: float) -> float | None:
    """Encodes a deadline in seconds as a field of a message."""
    return deadline if deadline <= MAX_DEADLINE else None


def deadline_of(message: Message) -> float:
    """Returns the deadline of a message in seconds, infinity for null.

    Raises:
      BadMessage: it is missing, or not a number of seconds up to `MAX_DEADLINE`.
    """
    (deadline,) = take(message, deadline=(int, float, type(None)))
    if deadline is None:
        return math.inf
    if not 0 <= deadline <= MAX_DEADLINE:  # false for NaN, too
        raise BadMessage(f"a {message['type']!r} whose 'deadline' is {deadline!r:.80}")
    return float(deadline)


def exit_code_of(message: Message) -> int:
    """Returns the exit code of a message.

    Raises:
      BadMessage: it is missing, or no exit code.
    """
    (code,) = take(message, code=int)
    if not -255 <= code <= 255:
        raise BadMessage(f"a {message['type']!r} whose 'code' is {code!r:.80}")
    return code


def ranks_of(message: Message, sender: int, size: int) -> tuple[int, ...] | None:
    """Returns the ranks of a message's subgroup, None for all members.

    Args:
      message: the message.
      sender: rank of the member that sent it.
      size: number of members of the job.

    Raises:
      BadMessage: they are not ranks in increasing order, or the sender is not among them.
    """
    (ranks,) = take(message, ranks=(list, type(None)))
    if ranks is None:
        return None
    known = set(range(size))
    if any(type(rank) is not int or rank not in known for rank in ranks) or sorted(set(ranks)) != ranks:
        raise BadMessage(f"a {message['type']!r} whose 'ranks' are {ranks!r:.80}")
    if sender not in ranks:
        raise BadMessage(f"a {message['type']!r} for ranks without its own, {ranks!r:.80}")
    return None if len(ranks) == size else tuple(ranks)


class MessageReader:
    """Splits a byte stream into messages.

    Attributes:
      limit: maximum number of bytes per message.
      unseal: returns the message of a sealed line, and raises `BadMessage` if it is not authentic; None while messages are
        not sealed.
      line: the last message as sent, without its seal and its newline.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.unseal: Callable[[bytes], bytes] | None = None
        self.line = b""
        self._pending = bytearray()
        self._searched = 0  # number of pending bytes without a newline

    @property
    def allowance(self) -> float:
        """Seconds that an incomplete message may delay the heartbeats after it, at `MIN_BYTES_PER_SECOND`.

        Its bytes are not verified yet: forged ones extend the limit, too, by a time that `limit` bounds.
        """
        return len(self._pending) / MIN_BYTES_PER_SECOND

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that `data` completes.

        Raises:
          BadMessage: a line is not a JSON object, or longer than the limit.
        """
        self._pending += data
        while (end := self._pending.find(b"\n", self._searched)) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            self._searched = 0
            self._check(len(line))
            self.line = self.unseal(line) if self.unseal else line
            yield _decode(self.line)
        self._searched = len(self._pending)
        self._check(self._searched)

    def _check(self, length: int) -> None:
        if length > self.limit:
            raise BadMessage(f"a message of more than {self.limit} bytes")


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a line that is not JSON: {line[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadMessage(f"a line that is not a message: {line[:80]!r}")
    return message


# Mutual authentication of a connection by a token that both ends know, and that is never sent.
# Each end sends a nonce in clear: the one that connects in its hello, the one that listens in its challenge. From the token
# and these two messages both derive one key for each direction. Every later message carries its HMAC-SHA256 (RFC 2104) under
# the key of its direction, over its number and its bytes. Without the token nobody can send, alter, repeat, reorder or reflect
# a message of this or another connection, but only cut the connection, which counts as a loss. Messages are not encrypted.
#
# Cost: 65 bytes and a few microseconds per message.

OVERHEAD = 65  # bytes that a seal adds to a message


class WrongSealError(BadMessage):
    """A message was not sealed by the other end of this connection, with the same token."""


def nonce() -> str:
    """Returns a random text, unique to a connection."""
    return secrets.token_hex(16)


def challenged(token: str, hello: bytes) -> tuple[Message, "Session"]:
    """Returns the answer to a hello, and the session of the end that sends it."""
    challenge = {"type": "challenge", "nonce": nonce()}
    return challenge, Session(token, hello, encode(challenge)[:-1], is_server=True)


def derived(token: str, purpose: str) -> str:
    """Returns a token for one purpose, which only those who know `token` can compute."""
    return hmac.digest(_bytes(token), b"tfdist token " + _bytes(purpose), "sha256").hex()


class Session:
    """The keys and counters of one connection, at one of its ends."""

    def __init__(self, token: str, hello: bytes, challenge: bytes, *, is_server: bool):
        """Derives the keys.

        Args:
          token: the token of both ends.
          hello: the first message, as it was sent, without the newline.
          challenge: the answer to it, likewise.
          is_server: whether this end has sent the challenge.
        """
        transcript = b"".join(hashlib.sha256(message).digest() for message in (hello, challenge))
        keys = [hmac.digest(_bytes(token), b"tfdist " + end + transcript, "sha256") for end in (b"client", b"server")]
        self._receiving, self._sending = keys if is_server else reversed(keys)
        self._received = self._sent = 0

    def seal(self, line: bytes) -> bytes:
        """Prepends the MAC to a message, a line with its newline; messages must be sent in the order of the calls."""
        mac = _mac(self._sending, self._sent, line[:-1])
        self._sent += 1
        return mac + b" " + line

    def unseal(self, line: bytes) -> bytes:
        """Returns the message of a sealed line without newline.

        Raises:
          WrongSealError: it is not the next message that the other end has sealed.
        """
        message = line[OVERHEAD:]
        if not hmac.compare_digest(line[:OVERHEAD], _mac(self._receiving, self._received, message) + b" "):
            raise WrongSealError("a message that is not authenticated with the job's token")
        self._received += 1
        return message


def _mac(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + message, "sha256").hex().encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


MAX_LINES = 10  # per minute and level
MAX_LINE_LENGTH = 500  # characters
_MINUTE = 60.0


class LimitedLog:
    """Writes the first lines of each minute to a log, and then the number of lines that it left out.

    Lines are limited in length, and control characters are escaped.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._writing = threading.Lock()  # guards the attributes below
        self._began = clock()
        self._lines: collections.Counter[int] = collections.Counter()  # by level

    def warning(self, line: str) -> None:
        """Writes a warning."""
        self._write(logging.WARNING, line)

    def error(self, message: str, error: Exception) -> None:
        """Writes a message about an unexpected exception, with its traceback."""
        frames = "".join(traceback.format_tb(error.__traceback__))
        self._write(logging.ERROR, f"{message} ({type(error).__name__}: {error})", f"\n{frames}")

    def summarize(self, now: bool = False) -> None:
        """Writes the number of lines left out if the minute is over, or `now`; to be called periodically."""
        with self._writing:
            self._summarize(now)

    def _write(self, level: int, line: str, trusted: str = "") -> None:
        with self._writing:
            self._summarize()
            self._lines[level] += 1
            if self._lines[level] <= MAX_LINES:
                self._log.log(level, "%s%s", printable(line, MAX_LINE_LENGTH), trusted)

    def _summarize(self, now: bool = False) -> None:
        if not now and self._clock() - self._began < _MINUTE:
            return
        left_out = sum(max(0, lines - MAX_LINES) for lines in self._lines.values())
        if left_out:
            self._log.warning("... and %d more lines about connections in the last minute", left_out)
        self._began = self._clock()
        self._lines.clear()


HELLO_SECONDS = 10.0  # from the connection to admission
MAX_UNAUTHENTICATED = 128  # connections that are not admitted yet; one more closes the oldest
WRONG_TOKEN = (
    "The token must match the group's. Received: a different one: another job listens there, or this process was started with "
    "other addresses. Give all processes of a job the same TFDIST_TOKEN, or none, and the same addresses."
)


def join_refusal(hello: Message, size: int, noun: str, joined: Mapping[int, str]) -> str:
    """Returns why a process that knows the token is refused, or "" if it may join.

    Args:
      hello: first message of a connection.
      size: number of members.
      noun: name of a member in messages.
      joined: by rank, description of each member that has joined, including former ones.

    Raises:
      BadMessage: the hello is incomplete.
    """
    rank, own_size, pid, host = take(hello, rank=int, size=int, pid=int, host=str)
    sender = f"{noun} {rank} (pid {pid} on {host})"
    if own_size != size:
        return (
            f"All processes must agree on the number of processes. Received: {own_size} from {sender}, {size} from "
            "the process that serves the group. Correct the environment of one of them."
        )
    if not 0 <= rank < size:
        return f"A {noun} must be in [0, {size}). Received: {sender}."
    if rank in joined:
        return (
            f"Every process must have a unique {noun}. Received: {sender}, already taken by {joined[rank]}. Correct "
            "the environment of one of them."
        )
    return ""


def version_refusal(hello: Message) -> str:
    """Returns why the sender of a hello cannot be challenged, or "".

    Raises:
      BadMessage: the message is not a hello.
    """
    if hello["type"] != "hello":
        raise BadMessage(f"{hello['type']!r} before a hello")
    if hello.get("version") == VERSION:
        take(hello, nonce=str)
        return ""
    return (
        f"Every process must use the same protocol version. Received: version {hello.get('version')!r:.20}, where the job's "
        f"is {VERSION}. Install the same tfdist everywhere."
    )
