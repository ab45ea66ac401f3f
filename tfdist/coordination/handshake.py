"""Decides which processes may join a group."""

import hmac
from collections.abc import Mapping
from typing import NamedTuple

from tfdist.coordination.messages import VERSION, BadMessage, Message, take

HELLO_SECONDS = 10.0  # from the connection to admission
MOST_STRANGERS = 128  # connections that are not admitted yet; for another one, the oldest is closed


class Handshake(NamedTuple):
    """The requirements that a hello must meet.

    Attributes:
      size: number of members.
      token: the group's token.
      noun: what a member is called.
    """

    size: int
    token: str
    noun: str

    def refusal(self, hello: Message, came: Mapping[int, str]) -> str:
        """Returns why a process is refused, or "" if it may join.

        Args:
          hello: first message of a connection.
          came: by rank, description of each member that has joined, including those that are gone.

        Raises:
          BadMessage: the message is not a hello.
        """
        if hello["type"] != "hello":
            raise BadMessage(f"{hello['type']!r} before a hello")
        rank, size, token, pid, host = take(hello, rank=int, size=int, token=str, pid=int, host=str)
        if not is_same_token(token, self.token):
            return (
                "The token must match the group's. Received: a different one: another job listens there, or this "
                "process was started with other addresses. Give all processes of a job the same TFDIST_TOKEN, or none, "
                "and the same addresses."
            )
        if hello.get("version") != VERSION:
            return (
                f"Every process must use the same protocol version. Received: version {hello.get('version')}, where "
                f"the group's is {VERSION}. Install the same tfdist everywhere."
            )
        mine = f"{self.noun} {rank} (pid {pid} on {host})"
        if size != self.size:
            return (
                f"All processes must agree on the number of processes. Received: {size} from {mine}, {self.size} from "
                "the process that serves the group. Correct the environment of one of them."
            )
        if not 0 <= rank < self.size:
            return f"A {self.noun} must be in [0, {self.size}). Received: {mine}."
        if rank in came:
            return f"Every process must have a unique {self.noun}. Received: {mine}, already taken by {came[rank]}."
        return ""


def is_same_token(one: str, other: str) -> bool:
    """Compares tokens in constant time; either may be any string, also one that is not valid Unicode."""
    return hmac.compare_digest(*(token.encode("utf-8", "surrogatepass") for token in (one, other)))
