"""The order in which gradients become updates, and when a worker may read weights: the rules of `--staleness`.

Pure bookkeeping, without threads, clocks or tensors. Version V of the weights is their state after V updates. The staleness
of a gradient is V - v, where it was computed from version v and turns version V into V + 1.
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
      staleness: of its gradient, in updates, as far as the order knows; a pull may have been of a newer version.
      versions: version of the weights of each server that its gradient was computed from; empty for several workers.
    """

    version: int
    ticket: int
    workers: tuple[int, ...]
    staleness: int
    versions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient, or a share of one, that is being computed or that waits to be applied.

    Attributes:
      ticket: the step whose rows it uses.
      version: version of the weights that it is computed from.
    """

    ticket: int
    version: int


class UpdateOrder(abc.ABC):
    """Decides which reads and updates may happen.

    Attributes:
      version: number of updates so far.
    """

    def __init__(self, version: int = 0):
        """Initializes the order; `version` is the number of updates that have been made before."""
        self.version = version

    @abc.abstractmethod
    def may_read(self, worker: int, ticket: int) -> bool:
        """Returns whether a worker may read the weights of the newest version to compute a ticket."""

    @abc.abstractmethod
    def read(self, worker: int, ticket: int) -> int:
        """Records that a worker reads the newest version, which it returns."""

    def withdraw(self, worker: int) -> None:
        """Forgets the read of a worker that is lost, if not all servers have its gradient yet."""

    @abc.abstractmethod
    def push(self, worker: int, ticket: int) -> None:
        """Records that all servers have a worker's gradient of a ticket."""

    @abc.abstractmethod
    def next_update(self) -> Update | None:
        """Returns the next update and counts it; None if none is ready."""


class Asynchronous(UpdateOrder):
    """Each worker computes whole tickets; with a bound, no gradient is ever staler than it.

    The bound is a hard one, as in Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server
    (2013), but for single updates. With V the newest version and d_1 <= d_2 <= ... the deadlines (version read + bound) of the
    gradients in flight, it holds if and only if V + i - 1 <= d_i for all i: applied in the order of their deadlines, none is
    late. A read or an update that would break this waits. The update of the oldest gradient never does, so that there is no
    deadlock.
    """

    def __init__(self, bound: int | None = None, version: int = 0):
        """Initializes the order.

        Args:
          bound: maximum staleness, at least 0; None for no bound.
          version: number of updates that have been made before.
        """
        super().__init__(version)
        self.bound = bound
        self._in_flight: dict[int, Gradient] = {}  # by worker
        self._pushed: collections.deque[int] = collections.deque()  # workers, in the order of their pushes

    def may_read(self, worker: int, ticket: int) -> bool:
        """See base class. The deadline of a new gradient is the last one: those in flight must fit before it.

        A worker has one gradient in flight: it does not read while its last one waits.
        """
        return worker not in self._in_flight and (self.bound is None or len(self._in_flight) <= self.bound)

    def read(self, worker: int, ticket: int) -> int:
        """See base class."""
        self._in_flight[worker] = Gradient(ticket, self.version)
        return self.version

    def withdraw(self, worker: int) -> None:
        """See base class. The deadlines of the others are met without it, too."""
        if worker not in self._pushed:
            self._in_flight.pop(worker, None)

    def push(self, worker: int, ticket: int) -> None:
        """See base class."""
        self._pushed.append(worker)

    def next_update(self) -> Update | None:
        """See base class; the first push that may be applied, not necessarily the first."""
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
        older = sorted(gradient.version for gradient in self._in_flight.values() if gradient.version < version)
        return all(self.version + place <= other + self.bound for place, other in enumerate(older, 1))


class Synchronous(UpdateOrder):
    """Every worker computes a share of each ticket; the shares are added in the order of ranks."""

    def __init__(self, workers: Sequence[int], version: int = 0, first_ticket: int = 0):
        """Initializes the order.

        Args:
          workers: ranks of the workers.
          version: number of updates that have been made before.
          first_ticket: the next ticket.
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
