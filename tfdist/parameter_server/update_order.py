"""Decides in which order gradients become updates, and when a worker may read weights: the rules of `--staleness`.

Uses no threads, clocks or tensors. Version V of the weights is their state after V updates. A gradient that is computed from
version v and applied to version V has the staleness V - v.
"""

import abc
import collections
from collections.abc import Sequence
from typing import NamedTuple


class Update(NamedTuple):
    """One update of the weights."""

    version: int  # version of the weights that it updates
    ticket: int  # the step whose rows it uses
    workers: tuple[int, ...]  # ranks whose shares of the gradient are added, in this order
    # For each worker, the version of the weights on each server from which it computed its gradient.
    versions: tuple[int, ...] = ()
    # Factor of the gradient after clipping; 0 if it is dropped or not finite, so that only the version changes.
    factor: float = 1.0
    # Factor of the sum of the shares before clipping: the rows of the batch over those of the shares.
    row_factor: float = 1.0
    loss_scale: float = 0.0  # factor of the loss with which the gradient was computed; 0 without loss scaling
    reads: tuple[int, ...] = ()  # in a replay, number of reads of `version` before the update, by server


class UpdateOrder(abc.ABC):
    """Decides which reads and updates may happen; `version` is the number of updates so far."""

    def __init__(self, version: int = 0):
        self.version = version

    @abc.abstractmethod
    def may_read(self, worker: int, ticket: int) -> bool:
        """Returns whether a worker may read the latest version of the weights to compute a ticket."""

    @abc.abstractmethod
    def read(self, worker: int, ticket: int) -> int:
        """Records that a worker reads the latest version; returns this version."""

    def keeps_weights(self, worker: int) -> bool:
        """Returns whether the next `read` of a worker is of the version that it read last, instead of the latest one."""
        return False

    def withdraw(self, worker: int) -> None:
        """Discards the read of a lost worker or of a rejected gradient, unless all servers have its gradient to apply."""

    @abc.abstractmethod
    def push(self, worker: int, ticket: int, rows: int = 1) -> None:
        """Records that all servers have a worker's gradient of a ticket, or its share, computed from `rows` rows."""

    @abc.abstractmethod
    def next_update(self) -> Update | None:
        """Returns the next update and increments `version`; returns None if no update is ready."""


class Asynchronous(UpdateOrder):
    """An order in which each worker computes whole tickets, optionally with a bound on the staleness.

    The bound is a hard limit, as in Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server
    (2013), but for single updates. Let V be the latest version and d_1 <= d_2 <= ... the deadlines (version read + bound) of
    the gradients in flight. The bound can be met if and only if V + i - 1 <= d_i for all i, by applying gradients in the order
    of their deadlines. A read or an update that would violate this waits. The update of the oldest gradient never waits, so
    there is no deadlock.

    A worker may compute several tickets from the same weights, whose deadline is then that of the first one. If the bound
    could not be met with this deadline, the worker reads the latest version instead.
    """

    def __init__(self, bound: int | None = None, version: int = 0, *, pull_every: int = 1, max_age: int | None = None):
        """Initializes the order.

        Args:
          bound: maximum staleness, at least 0; None for no bound.
          version: number of earlier updates.
          pull_every: maximum number of tickets that a worker computes from the same weights.
          max_age: maximum age of weights that a worker uses again, in updates; None for no maximum.
        """
        super().__init__(version)
        self.bound, self._pull_every, self._max_age = bound, pull_every, max_age
        self._last_reads: dict[int, tuple[int, int]] = {}  # version and number of tickets computed from it, by worker
        self._in_flight: dict[int, tuple[int, int]] = {}  # ticket and version of the gradient, by worker
        self._pushed: collections.deque[int] = collections.deque()  # workers, in the order of their pushes

    def may_read(self, worker: int, ticket: int) -> bool:
        """See base class. A new gradient has the last deadline, so all gradients in flight must be applied before it.

        A worker has at most one gradient in flight.
        """
        return worker not in self._in_flight and (self.bound is None or len(self._in_flight) <= self.bound)

    def keeps_weights(self, worker: int) -> bool:
        version, count = self._last_reads.get(worker, (0, self._pull_every))
        if count >= self._pull_every or (self._max_age is not None and self.version - version > self._max_age):
            return False
        versions = [version, *(other_version for _, other_version in self._in_flight.values())]
        return self._can_meet_deadlines(versions, self.version)

    def read(self, worker: int, ticket: int) -> int:
        version, count = self._last_reads[worker] if self.keeps_weights(worker) else (self.version, 0)
        self._last_reads[worker] = version, count + 1
        self._in_flight[worker] = ticket, version
        return version

    def withdraw(self, worker: int) -> None:
        """See base class. Without this gradient, the other deadlines can still be met."""
        if worker not in self._pushed:
            self._in_flight.pop(worker, None)

    def push(self, worker: int, ticket: int, rows: int = 1) -> None:
        self._pushed.append(worker)

    def next_update(self) -> Update | None:
        """See base class. Returns the earliest push that may be applied now."""
        for worker in self._pushed:
            ticket, version = self._in_flight[worker]
            older_versions = [older for _, older in self._in_flight.values() if older < version]
            if self._can_meet_deadlines(older_versions, self.version + 1):
                self._pushed.remove(worker)
                del self._in_flight[worker]
                self.version += 1
                return Update(self.version - 1, ticket, (worker,), (version,))
        return None

    def _can_meet_deadlines(self, versions: Sequence[int], next_version: int) -> bool:
        return self.bound is None or all(
            applied_at <= version + self.bound for applied_at, version in enumerate(sorted(versions), next_version)
        )


class Recorded(UpdateOrder):
    """An order that repeats recorded updates: each worker computes its tickets again, from the versions that it had read.

    A server applies an update when all reads of the version before it have been made, and a read waits for its version. In
    the recorded run, a worker read weights after its earlier updates. Thus, the first update that is not applied only waits
    for reads that can be made, and there is no deadlock.
    """

    def __init__(self, updates: Sequence[Update]):
        """Initializes the order with the updates of a whole range of tickets, in order; see `check_recorded`."""
        super().__init__(updates[0].version)
        self._tickets: dict[int, list[Update]] = {}  # by worker
        read_counts: collections.Counter[tuple[int, int]] = collections.Counter()  # by server and version
        for update in updates:
            tickets = self._tickets.setdefault(update.workers[0], [])
            if not tickets or tickets[-1].versions != update.versions:
                read_counts.update(enumerate(update.versions))
            tickets.append(update)
        self._updates = {
            update.ticket: update._replace(
                reads=tuple(read_counts[server, update.version] for server in range(len(update.versions)))
            )
            for update in updates
        }
        self._order = [update.ticket for update in updates]
        self._last_versions: dict[int, tuple[int, ...]] = {}  # by worker
        self._pushed: set[int] = set()  # tickets

    def update_of(self, ticket: int) -> Update:
        """Returns the recorded update of a ticket."""
        return self._updates[ticket]

    def remaining_tickets(self, worker: int) -> list[int]:
        """Returns the tickets that a worker has not read weights for, in order."""
        return [update.ticket for update in self._tickets.get(worker, ())]

    def may_read(self, worker: int, ticket: int) -> bool:
        """See base class. Servers delay the read."""
        return True

    def keeps_weights(self, worker: int) -> bool:
        return self._last_versions.get(worker) == self._tickets[worker][0].versions

    def read(self, worker: int, ticket: int) -> int:
        """See base class. Returns the oldest version that is read from a server."""
        versions = self._last_versions[worker] = self._tickets[worker].pop(0).versions
        return min(versions)

    def push(self, worker: int, ticket: int, rows: int = 1) -> None:
        self._pushed.add(ticket)

    def next_update(self) -> Update | None:
        if not self._order or self._order[0] not in self._pushed:
            return None
        self.version += 1
        return self._updates[self._order.pop(0)]


def check_recorded(updates: Sequence[Update], first: int, workers: int, servers: int, has_tables: bool = False) -> str:
    """Returns why `Recorded` cannot repeat the updates of a range of tickets that begins with `first`; "" if it can.

    If there are embedding tables, each ticket needs different rows, so workers cannot keep their weights.
    """
    other_calls = "other calls: use its --log_every, --steps_per_call and --checkpoint_every"
    last_updates: dict[int, Update] = {}  # by worker
    if {update.ticket for update in updates} != {*range(first, first + len(updates))}:
        return other_calls
    for version, update in enumerate(updates, first):
        (worker,), last = update.workers, last_updates.get(update.workers[0])
        is_new_read = last is None or last.versions != update.versions
        earliest = first if last is None else last.version + 1
        if len(update.versions) != servers or worker >= workers:
            return "another number of workers or servers: use the same"
        if has_tables and not is_new_read:
            return "weights that workers used for several steps: use a larger --min_table_bytes"
        if is_new_read and not earliest <= min(update.versions) <= max(update.versions) <= version:
            return other_calls
        last_updates[worker] = update
    return ""


class Synchronous(UpdateOrder):
    """An order in which workers compute shares of each ticket; ticket k is the update of version k.

    The shares of a ticket are added in the order of ranks. With a bound s, a worker computes ticket k as soon as version k - s
    exists, so it is at most s tickets ahead of the slowest worker: the clock of Ho et al., More Effective Distributed ML via a
    Stale Synchronous Parallel Parameter Server (2013). If fewer shares are needed than there are workers, the first ones that
    arrive are the update, and later ones are ignored, as in Chen et al., Revisiting Distributed Synchronous SGD (2016).
    """

    def __init__(self, needed_shares: int, version: int = 0, *, bound: int = 0):
        """Initializes the order; `bound` is the number of tickets that a worker may be ahead of the slowest worker."""
        super().__init__(version)
        self._bound, self._needed_shares = bound, needed_shares
        self._rows: dict[int, dict[int, int]] = collections.defaultdict(dict)  # of shares, by ticket and worker

    def may_read(self, worker: int, ticket: int) -> bool:
        return self.version <= ticket <= self.version + self._bound

    def read(self, worker: int, ticket: int) -> int:
        """See base class. Returns the version for which the worker must wait; it then reads a server's latest version."""
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
        return Update(ticket, ticket, workers)
