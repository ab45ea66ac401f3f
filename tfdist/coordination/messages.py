"""The group's wire format: one JSON object per line, of limited size.

A connection begins with a `hello` (rank, size, version, pid, host, nonce), which is answered by a `challenge` (nonce) or by
`refused`. From then on each message is sealed with the token (`tfdist.coordination.authentication`). The process sends `join`,
which is answered by `welcome` (with the group's nonce) or `refused`. Members then send `gather`, `publish`, `doubt`, `beat` and
`goodbye`, the last one. The server answers a gather with `values` or `failed`, preceded by `waiting` if it takes long. It sends
`published` to all members, `beat`, `lost` and, last, `closed`. `gather`, `publish` and `published` have the `ranks` of a
subgroup, in order, or null for all members.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.errors import InputError
from tfdist.errors.engine_errors import escaped

VERSION = 1  # of the protocol; other versions are refused with a message
LIMIT = 1 << 20  # maximum bytes per message
SLOWEST = 1 << 20  # bytes per second; at this rate, a message of any size may arrive, and does not count as silence
DOUBTED_BEATS = 3  # missing heartbeats that count as a loss once an engine has reported a failure
LIMIT_BEFORE_HELLO = 1 << 12  # for senders that have not presented the token yet
LONGEST_DEADLINE = 1e9  # seconds; longer ones are sent as null, which is none

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


def printable(text: str, longest: int) -> str:
    """Returns a text of another program for a log or a terminal: cut, and with control characters escaped."""
    return escaped(text[:longest])[:longest]


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
    """Returns a deadline in seconds in the form that messages have."""
    return deadline if deadline <= LONGEST_DEADLINE else None


def take_deadline(message: Message) -> float:
    """Returns the deadline of a message in seconds, infinity for null.

    Raises:
      BadMessage: it is missing, or not a number of seconds up to `LONGEST_DEADLINE`.
    """
    (deadline,) = take(message, deadline=(int, float, type(None)))
    if deadline is None:
        return math.inf
    if not 0 <= deadline <= LONGEST_DEADLINE:  # false for NaN, too
        raise BadMessage(f"a {message['type']!r} whose 'deadline' is {deadline!r:.80}")
    return float(deadline)


def take_code(message: Message) -> int:
    """Returns the exit code of a message.

    Raises:
      BadMessage: it is missing, or no exit code.
    """
    (code,) = take(message, code=int)
    if not -255 <= code <= 255:
        raise BadMessage(f"a {message['type']!r} whose 'code' is {code!r:.80}")
    return code


def take_ranks(message: Message, sender: int, size: int) -> tuple[int, ...] | None:
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
      unseal: returns the message of a sealed line, and raises `BadMessage` if it is not genuine; None while messages are not
        sealed.
      line: the last message as it was sent, without its seal and its newline.
    """

    def __init__(self, limit: int):
        """Initializes with `limit`."""
        self.limit = limit
        self.unseal: Callable[[bytes], bytes] | None = None
        self.line = b""
        self._pending = bytearray()
        self._searched = 0  # number of pending bytes without a newline

    @property
    def allowance(self) -> float:
        """Seconds that the bytes of an unfinished message take at `SLOWEST`, by which it may delay the heartbeats after it.

        Since these bytes are not verified yet, forged ones extend the limit by the same time, which `limit` bounds.
        """
        return len(self._pending) / SLOWEST

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
