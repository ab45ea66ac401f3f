"""The order in which gradients become updates, and when a worker may read weights: the rules of `--staleness`.

Uses no threads, clocks or tensors. Version V of the weights is their state after V updates. A gradient that is computed from
version v and applied to version V has the staleness V - v.
"""

import abc
import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


class Update(NamedTuple):
    """One update of the weights.

    Attributes:
      version: version of the weights that it updates.
      ticket: the step whose rows it uses.
      workers: ranks whose shares of the gradient are added, in this order.
      staleness: upper bound of the staleness of its gradient, in updates; the worker may have pulled a newer version.
      versions: for each server, version of the weights from which the gradient was computed; empty for several workers.
      factor: by which the gradient is multiplied; 0 if it is dropped, so that only the version changes.
    """

    version: int
    ticket: int
    workers: tuple[int, ...]
    staleness: int
    versions: tuple[int, ...] = ()
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient, or a share of one, that has not been applied yet.

    Attributes:
      ticket: the step whose rows it uses.
      version: version of the weights from which it is computed.
    """

    ticket: int
    version: int


class UpdateOrder(abc.ABC):
    """Decides which reads and updates may happen.

    Attributes:
      version: number of updates so far.
    """

    def __init__(self, version: int = 0):
        """Initializes the order after `version` updates."""
        self.version = version

    @abc.abstractmethod
    def may_read(self, worker: int, ticket: int) -> bool:
        """Returns whether a worker may read the latest version of the weights to compute a ticket."""

    @abc.abstractmethod
    def read(self, worker: int, ticket: int) -> int:
        """Records that a worker reads the latest version; returns this version."""

    def withdraw(self, worker: int) -> None:
        """Discards the read of a lost worker, unless all servers have its gradient."""

    @abc.abstractmethod
    def push(self, worker: int, ticket: int) -> None:
        """Records that all servers have a worker's gradient for a ticket."""

    @abc.abstractmethod
    def next_update(self) -> Update | None:
        """Returns the next update and counts it; None if none is ready."""


class Asynchronous(UpdateOrder):
    """An order in which each worker computes whole tickets, optionally with a bound on the staleness.

    The bound is a hard limit, as in Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server
    (2013), but for single updates. Let V be the latest version and d_1 <= d_2 <= ... the deadlines (version read + bound) of
    the gradients in flight. The bound can be met if and only if V + i - 1 <= d_i for all i, by applying gradients in the order
    of their deadlines. A read or an update that would violate this waits. The update of the oldest gradient never waits, so
    there is no deadlock.
    """

    def __init__(self, bound: int | None = None, version: int = 0):
        """Initializes the order.

        Args:
          bound: maximum staleness, at least 0; None for no bound.
          version: number of earlier updates.
        """
        super().__init__(version)
        self.bound = bound
        self._in_flight: dict[int, Gradient] = {}  # by worker
        self._pushed: collections.deque[int] = collections.deque()  # workers, in the order of their pushes

    def may_read(self, worker: int, ticket: int) -> bool:
        """See base class. A new gradient has the last deadline, so all gradients in flight must be applied before it.

        A worker has at most one gradient in flight.
        """
        return worker not in self._in_flight and (self.bound is None or len(self._in_flight) <= self.bound)

    def read(self, worker: int, ticket: int) -> int:
        """See base class."""
        self._in_flight[worker] = Gradient(ticket, self.version)
        return self.version

    def withdraw(self, worker: int) -> None:
        """See base class. Without this gradient, the other deadlines can still be met."""
        if worker not in self._pushed:
            self._in_flight.pop(worker, None)

    def push(self, worker: int, ticket: int) -> None:
        """See base class."""
        self._pushed.append(worker)

    def next_update(self) -> Update | None:
        """See base class. Returns the earliest push that may be applied now."""
        for worker in self._pushed:
            if self._may_apply(worker):
                self._pushed.remove(worker)
                gradient = self._in_flight.pop(worker)
                self.version += 1
                version = self.version - 1
                return Update(version, gradient.ticket, (worker,), version - gradient.version)
        return None

    def _may_apply(self, worker: int) -> bool:
        if self.bound is None:
            return True
        version = self._in_flight[worker].version
        older_versions = sorted(gradient.version for gradient in self._in_flight.values() if gradient.version < version)
        return all(
            self.version + position <= older_version + self.bound
            for position, older_version in enumerate(older_versions, 1)
        )


class Synchronous(UpdateOrder):
    """An order in which every worker computes a share of each ticket; shares are added in the order of ranks."""

    def __init__(self, workers: Sequence[int], version: int = 0, first_ticket: int = 0):
        """Initializes the order.

        Args:
          workers: ranks of the workers.
          version: number of earlier updates.
          first_ticket: the first ticket of the order.
        """
        super().__init__(version)
        self._workers = tuple(workers)
        self._ticket = first_ticket
        self._pushed: set[int] = set()

    def may_read(self, worker: int, ticket: int) -> bool:
        """See base class."""
        return ticket == self._ticket

    def read(self, worker: int, ticket: int) -> int:
        """See base class."""
        return self.version

    def push(self, worker: int, ticket: int) -> None:
        """See base class."""
        self._pushed.add(worker)

    def next_update(self) -> Update | None:
        """See base class."""
        if len(self._pushed) < len(self._workers):
            return None
        self._pushed.clear()
        self._ticket += 1
        self.version += 1
        return Update(self.version - 1, self._ticket - 1, self._workers, 0)
