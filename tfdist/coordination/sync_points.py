"""Acting at the same step on every rank, on anybody's wish, without a message while nobody has one."""

import secrets
import threading
from types import TracebackType

from tfdist.coordination import Group, Json
from tfdist.errors import PeerLostError

TOPIC = "meetings"


class SyncPoints:
    """What all ranks of one run do together between two calls of the compiled loop.

    The main thread of every rank says where it is, without a message: `begin` before each call of the loop and `reached`
    behind it; all ranks cut their steps into the same calls. Anybody may `wish`. The group tells all ranks of it in one
    order, and a thread of each answers with the first step at which its rank can still act: the end of the call that it is
    in, or, between two calls, the step after the last one. The greatest of these is agreed on, and the first call that
    ends there or behind it is where `reached` returns the wish, the same on every rank.

    No rank has passed the agreed step, because who has answered does not leave `reached` at that step or behind it before
    it knows what was agreed on. No rank waits for one that waits in a collective for it: answers never wait for a main
    thread, and nothing else is waited for.

    A context manager, around one run. The group's next `SyncPoints` begins where this one has ended on all ranks; a wish of
    the time between them is for the next one, and one that has found no further call has no effect.
    """

    def __init__(self, group: Group):
        """Args: group: of all ranks that run."""
        self._group = group
        self._over = 0  # how many ranks have ended
        self._news = threading.Condition()  # around what follows
        self._wishes: list[tuple[str, str]] = []  # topics that are still to be agreed on, and the agreements' names
        self._thread: threading.Thread | None = None  # lives while there is one
        self._earliest = 0  # the first step at which this rank can still act
        self._answered: int | None = None  # the step that the agreement which is under way has of this rank
        self._agreed: list[tuple[str, int]] = []
        self._failure: PeerLostError | None = None
        group.on_told(TOPIC, self._told)

    def wish(self, topic: str) -> None:
        """Lets all ranks act on a topic at a step that comes soon; from any thread, without waiting.

        The same topic wished by several ranks at about the same time may fall due once or several times.
        """
        self._group.tell(TOPIC, {"wish": topic, "name": f"{TOPIC}/{secrets.token_hex(8)}"})

    def begin(self, end_step: int) -> None:
        """Says that the main thread enters a call of the compiled loop that ends at a step."""
        with self._news:
            self._earliest = end_step

    def reached(self, step: int) -> frozenset[str]:
        """Says that the call has ended at a step; returns the topics that all ranks act on now.

        Raises:
          PeerLostError: a rank was lost, so that nothing can be agreed on.
        """
        with self._news:
            self._news.wait_for(lambda: self._failure or self._answered is None or self._answered > step)
            if self._failure:
                raise self._failure
            due = frozenset(topic for topic, first in self._agreed if first <= step)
            self._agreed = [(topic, first) for topic, first in self._agreed if first > step]
            self._earliest = step + 1
            return due

    def __enter__(self) -> "SyncPoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends this rank's part. Its thread answers the others until the last of them has ended, too."""
        self._group.tell(TOPIC, {"over": True})

    def _told(self, said: Json) -> bool:
        """Hears wishes and ends, on every rank in the same order: so all answer the same wishes."""
        if "wish" not in said:
            self._over += 1
            return self._over == self._group.size
        with self._news:
            self._wishes.append((said["wish"], said["name"]))
            if self._thread is None:
                self._thread = threading.Thread(target=self._agree, name=f"meetings-{self._group.rank}", daemon=True)
                self._thread.start()
        return False

    def _agree(self) -> None:
        while True:
            with self._news:
                if not self._wishes:
                    self._thread = None
                    return
                topic, name = self._wishes.pop(0)
                self._answered = self._earliest
            try:
                first = max(self._group.gather(name, self._answered, deadline=float("inf")))
            except PeerLostError as error:
                self._fail(error)
                continue
            with self._news:
                self._agreed.append((topic, first))
                self._answered = None
                self._news.notify_all()

    def _fail(self, error: PeerLostError) -> None:
        """Who has left of its own accord has no call to come; so there is nothing to agree on, and nothing wrong."""
        with self._news:
            self._failure = error if self._group.lost() else None
            self._answered = None
            self._news.notify_all()
