"""The group's messages on the wire: JSON objects, one a line, of limited size.

A connection begins with a `hello` (rank, size, token, version, pid, host), which is answered by `welcome` or `refused`.
Then members send `gather`, `tell`, `doubt`, `beat` and, last, `goodbye`; the server sends `values` or `failed` to a gather, and
before that `waiting` if it lasts, `told` to all, `beat`, `lost` and, last, `closed`.
"""

import json
from collections.abc import Iterator
from typing import Any

from tfdist.errors import InputError

VERSION = 5  # of the protocol; another one is refused by name
LIMIT = 1 << 20  # bytes a message
DOUBTED_BEATS = 3  # so many missing signs of life are a loss, once an engine has failed somebody
LIMIT_BEFORE_HELLO = 1 << 12  # what somebody may send who has not shown the token

Message = dict[str, Any]


class BadMessage(ValueError):
    """What arrived is not a message, or too large."""


def encode(message: Message) -> bytes:
    """Returns the line that carries a message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def limited(message: Message, name: str) -> bytes:
    """Returns the line that carries a message of a user's.

    Raises:
      InputError: it is too long; `name` says what it is.
    """
    line = encode(message)
    if len(line) > LIMIT:
        raise InputError(
            f"A message of the group may have {LIMIT} bytes. Received: {len(line)} for '{name}'. The group carries small "
            "values; write large ones to a file."
        )
    return line


def take(message: Message, **kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """Returns a message's fields, in the order of the arguments, each of the kind that is named.

    Raises:
      BadMessage: a field is missing or of another kind.
    """
    for name, kind in kinds.items():
        if name not in message or not isinstance(message[name], kind):
            raise BadMessage(f"a {message['type']!r} whose {name!r} is {message.get(name)!r:.80}")
    return tuple(message[name] for name in kinds)


class Lines:
    """Cuts what arrives into messages."""

    def __init__(self, limit: int):
        """Args: limit: bytes a message."""
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that `data` completes.

        Raises:
          BadMessage: a line is no JSON object, or longer than the limit.
        """
        searched = len(self._pending)
        self._pending += data
        while (end := self._pending.find(b"\n", searched)) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            searched = 0
            self._check(len(line))
            yield _decode(line)
        self._check(len(self._pending))

    def _check(self, length: int) -> None:
        if length > self.limit:
            raise BadMessage(f"a message of more than {self.limit} bytes")


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a line that is not JSON: {line[:80]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadMessage(f"a line that is no message: {line[:80]!r}")
    return message
