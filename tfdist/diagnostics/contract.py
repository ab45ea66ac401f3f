"""The contract `Inspection`, and what one is given to look at."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

from tfdist.step.compiled_steps import Steps


class Site(NamedTuple):
    """One run, as an inspection sees it.

    Attributes:
      steps: makes trials of a step.
      batch_size: rows of a global batch.
      batch: the rows of the step of this number, for `Strategy.run`; the training's own reading is not disturbed.
    """

    steps: Steps
    batch_size: int
    batch: Callable[[int], Any]


class Inspection(abc.ABC):
    """Looks at a run before certain steps. Every process has the same ones, and they look at the same steps."""

    @abc.abstractmethod
    def next(self, step: int) -> int | None:
        """The first step, this one or a later one, before which it wants to look; None if it is done."""

    @abc.abstractmethod
    def look(self, step: int) -> dict[str, float]:
        """Looks before a step that `next` has named; returns fields for the training records from now on."""


class Periodic(Inspection):
    """Looks every so many steps."""

    def __init__(self, every: int, first: int | None = None):
        """Args: every: steps between two looks; first: the step of the first one, at most `every`, which it is by default."""
        self._every = every
        self._first = every if first is None else first

    def next(self, step: int) -> int | None:
        """See base class."""
        return self._first if step <= self._first else -(-step // self._every) * self._every
