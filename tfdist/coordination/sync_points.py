"""Lets all ranks act at the same step when any rank requests it. Nothing is sent without a request."""

import contextlib
import secrets
import threading

from tfdist.coordination import Group, Json
from tfdist.errors import PeerLostError

TOPIC = "sync_points"


class SyncPoints(contextlib.AbstractContextManager["SyncPoints"]):
    """Coordinates actions of all ranks of a run between two calls of the compiled loop.

    The main thread of every rank reports its progress locally: `begin` before each call of the loop and `end_call` after
    it. All ranks split their steps into the same calls. Any thread may request a topic (`request`). The group delivers
    requests to all ranks in the same order, and a thread on each rank answers with the first step at which the rank can
    still act: the end of the current call or, between two calls, the step after the last one. The ranks agree on the
    maximum of the answers. After the first call that ends at or after this step, `end_call` returns the topic on every rank.

    No rank can have passed the agreed step: after its answer, a rank does not return from `end_call` at or after the step of
    the answer until the agreement is known. There is no deadlock with a rank that waits in a collective, because answers
    never wait for a main thread.

    Use it as a context manager around one run. The group's next `SyncPoints` starts when this one has ended on all ranks,
    and receives requests made before that. A request after the end of the last call has no effect.
    """

    def __init__(self, group: Group):
        self._group = group  # of all ranks of the run
        self._ended_members: set[int] = set()  # members whose part has ended
        self._condition = threading.Condition()  # guards the attributes below
        self._requests: list[tuple[str, str]] = []  # requested topics and the names of their gathers
        self._thread: threading.Thread | None = None  # exists while there is a request
        self._earliest_step = 0  # the first step at which this rank can still act
        self._pending_answer: int | None = None  # this rank's answer to the pending agreement
        self._agreed_steps: list[tuple[str, int]] = []
        self._failure: PeerLostError | None = None
        group.subscribe(TOPIC, self._on_message)

    def request(self, topic: str) -> None:
        """Requests that all ranks act on a topic at the same step. Does not wait; may be called from any thread.

        If several ranks request the same topic at about the same time, it may be returned once or several times.
        """
        self._group.publish(TOPIC, {"request": topic, "name": f"{TOPIC}/{secrets.token_hex(8)}"})

    def begin(self, end_step: int) -> None:
        """Records that the main thread enters a call of the compiled loop that ends at `end_step`."""
        with self._condition:
            self._earliest_step = end_step

    def end_call(self, step: int) -> frozenset[str]:
        """Records that a call has ended at a step, and returns the topics on which all ranks act now.

        Raises:
          PeerLostError: a rank was lost, so no agreement is possible.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._failure or self._pending_answer is None or self._pending_answer > step
            )
            if self._failure:
                raise self._failure
            due_topics = frozenset(topic for topic, agreed_step in self._agreed_steps if agreed_step <= step)
            self._agreed_steps = [
                (topic, agreed_step) for topic, agreed_step in self._agreed_steps if agreed_step > step
            ]
            self._earliest_step = step + 1
            return due_topics

    def __exit__(self, *_: object) -> None:
        """Ends this rank's part; its thread answers until all ranks have ended."""
        self._group.publish(TOPIC, {"over": self._group.rank})

    def _on_message(self, message: Json) -> bool:
        """Handles a message; all ranks receive messages in the same order and thus answer the same requests."""
        if "request" not in message:
            self._ended_members.add(message["over"])
            return self._ended_members | self._group.departed_members >= {*range(self._group.size)}
        with self._condition:
            self._requests.append((message["request"], message["name"]))
            if self._thread is None:
                self._thread = threading.Thread(target=self._agree, name=f"sync-points-{self._group.rank}", daemon=True)
                self._thread.start()
        return False

    def _agree(self) -> None:
        while True:
            with self._condition:
                if not self._requests:
                    self._thread = None
                    return
                topic, name = self._requests.pop(0)
                self._pending_answer = self._earliest_step
            answers: list[Json] = []
            failure = None
            try:
                answers = self._group.gather(name, self._pending_answer, deadline=float("inf"))
            except PeerLostError as error:
                # If a rank has left without an error, there are no further calls, and this is not a failure.
                failure = error if self._group.first_loss() else None
            with self._condition:
                if answers:
                    self._agreed_steps.append((topic, max(answer for answer in answers if answer is not None)))
                self._failure = self._failure or failure
                self._pending_answer = None
                self._condition.notify_all()
