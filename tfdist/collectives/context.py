"""Which collectives a layer inside a step speaks through: those of the strategy that runs the step."""

import contextlib
import contextvars
from collections.abc import Iterator

from tfdist.collectives.contract import Collectives
from tfdist.collectives.single import OneReplica

_ALONE = OneReplica()
_current: contextvars.ContextVar[Collectives] = contextvars.ContextVar("collectives", default=_ALONE)


def current() -> Collectives:
    """Returns the collectives of the step that is being run or traced; those of one replica outside any step."""
    return _current.get()


@contextlib.contextmanager
def using(collectives: Collectives) -> Iterator[None]:
    """Makes `collectives` the current ones. A strategy enters it inside each replica's function, in its thread."""
    token = _current.set(collectives)
    try:
        yield
    finally:
        _current.reset(token)
