"""Decides which processes, of those that know the job's token, may join a group."""

from collections.abc import Mapping
from typing import NamedTuple

from tfdist.coordination.messages import VERSION, BadMessage, Message, take

HELLO_SECONDS = 10.0  # from the connection to admission
MAX_UNAUTHENTICATED = 128  # connections that are not admitted yet; for another one, the oldest is closed
WRONG_TOKEN = (
    "The token must match the group's. Received: a different one: another job listens there, or this process was started with "
    "other addresses. Give all processes of a job the same TFDIST_TOKEN, or none, and the same addresses."
)


class Handshake(NamedTuple):
    """The requirements that a process must meet.

    Attributes:
      size: number of members.
      token: the group's token.
      noun: what a member is called.
    """

    size: int
    token: str
    noun: str

    def refusal(self, hello: Message, came: Mapping[int, str]) -> str:
        """Returns why a process that knows the token is refused, or "" if it may join.

        Args:
          hello: first message of a connection.
          came: by rank, description of each member that has joined, including those that are gone.

        Raises:
          BadMessage: the hello is incomplete.
        """
        rank, size, pid, host = take(hello, rank=int, size=int, pid=int, host=str)
        mine = f"{self.noun} {rank} (pid {pid} on {host})"
        if size != self.size:
            return (
                f"All processes must agree on the number of processes. Received: {size} from {mine}, {self.size} from "
                "the process that serves the group. Correct the environment of one of them."
            )
        if not 0 <= rank < self.size:
            return f"A {self.noun} must be in [0, {self.size}). Received: {mine}."
        if rank in came:
            return (
                f"Every process must have a unique {self.noun}. Received: {mine}, already taken by {came[rank]}. Correct "
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
