"""Delivers published values to the callbacks of their topic."""

import logging
import threading
from collections.abc import Callable, Hashable

from tfdist.coordination.group import Json, Listener

JOIN_SECONDS = 2.0

_log = logging.getLogger("tfdist.coordination")


class Publications:
    """Published values in the order of publication, and their subscribers.

    A thread exists while there is a value to deliver.
    """

    def __init__(self, name: str):
        """Initializes with the `name` of the delivering thread."""
        self._name = name
        self._state = threading.Lock()  # guards the attributes below
        self._values: list[tuple[Hashable, Json]] = []
        self._listeners: dict[Hashable, list[Listener]] = {}  # by topic; only the first one receives values
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, topic: Hashable, value: Json) -> None:
        """Adds a published value."""
        with self._state:
            self._values.append((topic, value))
            self._start()

    def listen(self, topic: Hashable, callback: Listener) -> None:
        """See `Group.subscribe`."""
        with self._state:
            self._listeners.setdefault(topic, []).append(callback)
            self._start()

    def close(self) -> None:
        """Stops delivering values, and waits for a running callback to return."""
        with self._state:
            self._closed = True
            thread = self._thread
        if thread and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def _start(self) -> None:
        if self._thread is None and self._next() is not None:
            self._thread = threading.Thread(target=self._deliver, name=self._name, daemon=True)
            self._thread.start()

    def _next(self) -> int | None:
        """Returns the index of the first value that has a subscriber."""
        heard = (i for i, (topic, _) in enumerate(self._values) if self._listeners.get(topic))
        return None if self._closed else next(heard, None)

    def _deliver(self) -> None:
        while True:
            with self._state:
                number = self._next()
                if number is None:
                    self._thread = None
                    return
                topic, value = self._values.pop(number)
                callback = self._listeners[topic][0]
            if _call(callback, topic, value):
                with self._state:
                    self._listeners[topic].remove(callback)


def _call(callback: Callable[[Json], object], topic: Hashable, value: Json) -> bool:
    try:
        return callback(value) is True
    except Exception:
        _log.exception("A handler of '%s' failed", topic)
        return False
