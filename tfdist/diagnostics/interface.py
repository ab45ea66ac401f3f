"""The `Inspection` contract, and the view of a run that inspections get."""

import abc
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from tfdist.step.compiled_steps import Steps

T = TypeVar("T")


class RunView(NamedTuple):
    """A run, as seen by an inspection.

    Attributes:
      steps: compiles probe steps.
      batch_size: rows of a global batch.
      batch: returns a batch for `Strategy.run` like that of a step number, without advancing the training iterator.
    """

    steps: Steps
    batch_size: int
    batch: Callable[[int], Any]


class CompiledProbe(Generic[T]):
    """A probe step, or several, for the current compression methods; created again when these change."""

    def __init__(self, steps: Steps, create: Callable[[], T]):
        """Initializes with a function that creates the probe; creates nothing yet."""
        self._steps, self._create = steps, create
        self._overrides: dict[str, str] | None = None

    def get(self) -> T:
        """Returns the probe."""
        if self._overrides != self._steps.overrides:
            self._overrides = dict(self._steps.overrides)
            self._probe = self._create()
        return self._probe


class Inspection(abc.ABC):
    """Inspects a run before certain steps; every process has the same inspections, at the same steps."""

    @abc.abstractmethod
    def next(self, step: int) -> int | None:
        """Returns the first step, at or after `step`, before which to inspect; None if there is none."""

    @abc.abstractmethod
    def inspect(self, step: int) -> dict[str, float]:
        """Inspects the run before a step returned by `next`; returns fields for all later training records."""


class Periodic(Inspection):
    """Inspects a run every `every` steps."""

    def __init__(self, every: int, first: int | None = None):
        """Sets the period.

        Args:
          every: steps between inspections.
          first: step of the first inspection, at most `every`, which is also the default.
        """
        self._every = every
        self._first = every if first is None else first

    def next(self, step: int) -> int | None:
        """See base class."""
        return self._first if step <= self._first else -(-step // self._every) * self._every
