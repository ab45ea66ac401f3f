import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.coordination.members import Job
from tests.coordination.wire import Between
from tests.waiting import DEADLINE


@pytest.fixture(autouse=True)
def every_thread_ends(no_thread_is_left: None) -> None:
    """Applies `no_thread_is_left` to every test in this directory."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets members wait for a server of a test, a thread that may not run for seconds, longer than for a real one."""
    monkeypatch.setattr("tfdist.coordination.client.SERVER_GRACE_SECONDS", DEADLINE)
    monkeypatch.setattr("tfdist.coordination.client.JOIN_SECONDS", DEADLINE)


@pytest.fixture
def middle() -> Iterator[Callable[..., Between]]:
    with contextlib.ExitStack() as stack:

        def create(*arguments: Any, **ways: Any) -> Between:
            stack.callback((made := Between(*arguments, **ways)).close)
            return made

        yield create


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as stack:

        def create(size: int, members: bool = True, **server: Any) -> Job:
            made = Job(size, **server)
            stack.callback(made.close)
            for rank in range(size if members else 0):
                made.join(rank)
            return made

        yield create
