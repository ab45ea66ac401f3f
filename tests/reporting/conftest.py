"""A clock for reporters."""

import pytest


class Clock:
    """A simulated clock."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still until its time is set."""
    return Clock()
