"""The current collectives, which layers inside a step use: those of the strategy that runs the step."""

import contextlib
import contextvars
from collections.abc import Iterator

from tfdist.collectives.interface import Collectives
from tfdist.collectives.single_replica import OneReplica

_ALONE = OneReplica()
_current: contextvars.ContextVar[Collectives] = contextvars.ContextVar("collectives", default=_ALONE)


def current() -> Collectives:
    """Returns the collectives of the step that is being run or traced; outside of a step, those of one replica."""
    return _current.get()


@contextlib.contextmanager
def using(collectives: Collectives) -> Iterator[None]:
    """Makes `collectives` the current ones; entered by a strategy inside each replica function, in its thread."""
    token = _current.set(collectives)
    try:
        yield
    finally:
        _current.reset(token)
