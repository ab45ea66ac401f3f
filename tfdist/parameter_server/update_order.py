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
      versions: for each worker, the version of the weights on each server from which it computed its gradient.
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
    def push(self, worker: int, ticket: int, rows: int = 1) -> None:
        """Records that all servers have a worker's gradient for a ticket, or its share of one, of this number of rows."""

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

    def push(self, worker: int, ticket: int, rows: int = 1) -> None:
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
    """An order in which workers compute shares of each ticket; ticket k is the update of version k.

    The shares of a ticket are added in the order of ranks. With a bound s, a worker computes ticket k as soon as version k - s
    exists, so it is at most s tickets ahead of the slowest worker: the clock of Ho et al., More Effective Distributed ML via a
    Stale Synchronous Parallel Parameter Server (2013). If fewer shares are needed than there are workers, the first ones that
    arrive are the update, and later ones are ignored, as in Chen et al., Revisiting Distributed Synchronous SGD (2016).
    """

    def __init__(self, workers: Sequence[int], version: int = 0, *, bound: int = 0, needed_shares: int | None = None):
        """Initializes the order.

        Args:
          workers: ranks of the workers.
          version: number of earlier updates.
          bound: number of tickets that a worker may be ahead, at least 0.
          needed_shares: number of shares of an update; by default one of each worker.
        """
        super().__init__(version)
        self._bound, self._needed_shares = bound, needed_shares or len(workers)
        self._rows: dict[int, dict[int, int]] = collections.defaultdict(dict)  # of shares, by ticket and worker

    def may_read(self, worker: int, ticket: int) -> bool:
        """See base class."""
        return self.version <= ticket <= self.version + self._bound

    def read(self, worker: int, ticket: int) -> int:
        """See base class. Returns the version for which the worker must wait; it reads the latest that a server has."""
        return max(ticket - self._bound, 0)

    def push(self, worker: int, ticket: int, rows: int = 1) -> None:
        """See base class. A share of an earlier ticket has no effect."""
        self._rows[ticket][worker] = rows

    def next_update(self) -> Update | None:
        """See base class. An update needs at least one row: in a small batch, some workers have none."""
        rows = self._rows[self.version]
        if len(rows) < self._needed_shares or not any(rows.values()):
            return None
        ticket, workers = self.version, tuple(sorted(self._rows.pop(self.version)))
        self.version += 1
        return Update(ticket, ticket, workers, min(self._bound, ticket))
