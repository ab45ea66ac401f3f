"""The group's wire format, one JSON object per line, and the authentication of connections by a token that is never sent.

A connection starts with a `hello` (rank, size, pid, host, nonce), which is answered by a `challenge` (nonce) or
`refused`. From then on, all messages are authenticated with the token. The process sends `join`, which is answered by `welcome`
(with the group's nonce) or `refused`. Members then send `gather`, `publish`, `doubt`, `beat` and finally `goodbye`. The server
answers a gather with `values` or `failed`, preceded by `waiting` if it takes long. It sends `published` to all members, `beat`,
`lost` and finally `closed`. `gather`, `publish` and `published` have a field `ranks`: the ranks of a subgroup, in order, or
null for all members.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.errors import InputError, escape_control_characters

LIMIT = 1 << 20  # maximum bytes per message
DOUBTED_BEATS = 3  # missing heartbeats that count as a loss after an engine has reported a failure
LIMIT_BEFORE_HELLO = 1 << 12  # for unauthenticated senders

Message = dict[str, Any]


class BadMessage(ValueError):
    """Raised for received data that is not a valid message, or too large."""


def encode(message: Message) -> bytes:
    """Returns the line that encodes a message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_limited(message: Message, name: str) -> bytes:
    """Encodes a message that contains a user's value; raises `InputError` with `name` if it is too long."""
    line = encode(message)
    if len(line) > LIMIT:
        raise InputError(
            f"A message of the group must have at most {LIMIT} bytes. Received: {len(line)} for '{name}'. The group "
            "sends small values; write large ones to a file."
        )
    return line


def printable(text: str, limit: int) -> str:
    """Returns text from another program for a log or a terminal, truncated and with control characters escaped."""
    return escape_control_characters(text[:limit])[:limit]


class MessageReader:
    """Splits a byte stream into messages.

    Attributes:
      limit: maximum number of bytes per message.
      unseal: returns the message of a sealed line, or raises `BadMessage` if it is not authentic; None before messages are
        sealed.
      line: the last message as sent, without its seal and newline.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.unseal: Callable[[bytes], bytes] | None = None
        self.line = b""
        self._pending = bytearray()
        self._searched_bytes = 0  # number of pending bytes without a newline

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that `data` completes.

        Raises:
          BadMessage: a line is not a JSON object, or longer than the limit.
        """
        self._pending += data
        while (end := self._pending.find(b"\n", self._searched_bytes)) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            self._searched_bytes = 0
            self._check(len(line))
            self.line = self.unseal(line) if self.unseal else line
            yield _decode(self.line)
        self._searched_bytes = len(self._pending)
        self._check(self._searched_bytes)

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


# Mutual authentication of a connection by a token that both ends know and never send.
# Each end sends a nonce in clear: the client in its hello, the server in its challenge. From the token and these two messages,
# both derive a key for each direction. Every later message is preceded by its HMAC-SHA256 (RFC 2104) with the key of its
# direction, over its index and its bytes. Without the token, an attacker cannot forge, alter, repeat, reorder or reflect
# messages, but can only cut the connection, which counts as a loss. Messages are not encrypted.
#
# The cost is 65 bytes and a few microseconds per message.

OVERHEAD = 65  # bytes of a seal


class WrongSealError(BadMessage):
    """Raised for a message that the other end of this connection has not sealed with the same token."""


def nonce() -> str:
    """Returns a random string, unique to a connection."""
    return secrets.token_hex(16)


def derive_token(token: str, purpose: str) -> str:
    """Returns a token for one purpose, which can be computed only from `token`."""
    return hmac.digest(_bytes(token), b"tfdist token " + _bytes(purpose), "sha256").hex()


class Session:
    """The keys and counters of one end of a connection."""

    def __init__(self, token: str, hello: bytes, challenge: bytes, *, is_server: bool):
        """Derives the keys.

        Args:
          token: the token of both ends.
          hello: the first message as sent, without the newline.
          challenge: the answer as sent, without the newline.
          is_server: whether this end sent the challenge.
        """
        transcript = b"".join(hashlib.sha256(message).digest() for message in (hello, challenge))
        keys = [hmac.digest(_bytes(token), b"tfdist " + end + transcript, "sha256") for end in (b"client", b"server")]
        self._receive_key, self._send_key = keys if is_server else reversed(keys)
        self._receive_count = self._send_count = 0

    def seal(self, line: bytes) -> bytes:
        """Prepends the MAC to a line, including its newline; messages must be sent in the order of the calls."""
        mac = _mac(self._send_key, self._send_count, line[:-1])
        self._send_count += 1
        return mac + b" " + line

    def unseal(self, line: bytes) -> bytes:
        """Returns the message of a sealed line without its newline.

        Raises:
          WrongSealError: the line is not the next message of the other end.
        """
        message = line[OVERHEAD:]
        if not hmac.compare_digest(line[:OVERHEAD], _mac(self._receive_key, self._receive_count, message) + b" "):
            raise WrongSealError("a message that is not authenticated with the job's token")
        self._receive_count += 1
        return message


def _mac(key: bytes, index: int, message: bytes) -> bytes:
    return hmac.digest(key, index.to_bytes(8, "big") + message, "sha256").hex().encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


HELLO_SECONDS = 10.0  # from the opening of a connection to its admission
MAX_UNAUTHENTICATED = 128  # connections that are not admitted yet; another one closes the oldest
WRONG_TOKEN = (
    "The token must match the group's. Received: a different token, because another job listens there or this process was "
    "started with other addresses. Set the same TFDIST_TOKEN, or none, and the same addresses for all processes of a job."
)


def join_refusal(hello: Message, size: int, noun: str, members: Mapping[int, str]) -> str:
    """Returns the reason why a process that knows the token may not join, or "" if it may.

    Args:
      hello: first message of a connection.
      size: number of members.
      noun: name of a member in messages.
      members: by rank, descriptions of all members that have joined, including former ones.

    Raises:
      BadMessage: the hello is incomplete.
    """
    rank, sender_size, pid, host = map(hello.get, ("rank", "size", "pid", "host"))
    if not (isinstance(rank, int) and isinstance(sender_size, int) and isinstance(pid, int) and isinstance(host, str)):
        raise BadMessage(f"an incomplete hello: {hello!r:.200}")
    sender = f"{noun} {rank} (pid {pid} on {host})"
    if sender_size != size:
        return (
            f"All processes must agree on the number of processes. Received: {sender_size} from {sender}, {size} from "
            "the process that serves the group. Correct the environment of one of them."
        )
    if not 0 <= rank < size:
        return f"A {noun} must be in [0, {size}). Received: {sender}."
    if rank in members:
        return (
            f"Every process must have a unique {noun}. Received: {sender}, already taken by {members[rank]}. Correct "
            "the environment of one of them."
        )
    return ""
