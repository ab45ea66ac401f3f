"""A thread that is suspended, as by SIGSTOP: its clock shows it, and no test has to wait for it."""

import selectors
import time

import pytest

from tests.waiting import wait_for


class Suspension:
    """The clock and the selectors of a module, in whose `select` more time passes than does in the test.

    Attributes:
      pause: seconds that the next `select` takes, with nothing to read at its end.
      pace: seconds that any other one takes longer.
      turns: calls of `select` since the pause.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str):
        self.pause = self.pace = self._passed = 0.0
        self.turns = 0
        suspension = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout=None):
                ready = super().select(timeout)
                return [] if suspension._pass() else ready

        monkeypatch.setattr(selectors, "DefaultSelector", Selector)
        monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self._passed

    def _pass(self) -> bool:
        paused = self.pause
        self._passed += paused or self.pace
        self.turns = 0 if paused else self.turns + 1
        if paused:
            self.pause = 0.0
        return bool(paused)

    def suspend(self, seconds: float) -> None:
        """Lets a `select` take so long, and waits until the thread has run again."""
        self.pause = seconds
        wait_for(lambda: not self.pause and self.turns > 2)
