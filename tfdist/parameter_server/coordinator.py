"""The coordinator of a job with parameter servers: deals steps, admits reads, and orders updates. It runs on server 0."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.parameter_server.messages import Handler, Message
from tfdist.parameter_server.update_order import Asynchronous, Synchronous, Update, UpdateOrder


class RangeResult(NamedTuple):
    """What a range of tickets has resulted in.

    Attributes:
      losses: of each ticket, in order; the last one is not finite if `is_finite` is False.
      updates: in their order.
      is_finite: whether all losses and gradients were finite.
    """

    losses: Sequence[float]
    updates: Sequence[Update]
    is_finite: bool


class Coordinator:
    """Serves all workers and servers; its methods are called from several threads, and some of them wait.

    A ticket is the work of one update: ticket k uses the rows of step k. Workers open a range of tickets, compute those that
    they take, and wait for its end, when all are applied: a record, an evaluation or a checkpoint after it misses nothing.
    """

    def __init__(self, workers: int, *, synchronous: bool, bound: int | None = None):
        """Initializes the coordinator.

        Args:
          workers: number of workers.
          synchronous: whether every worker computes a share of each ticket.
          bound: maximum staleness, if workers compute whole tickets; None for no bound.
        """
        self._workers, self._synchronous, self._bound = workers, synchronous, bound
        self._changed = threading.Condition()
        self._order: UpdateOrder | None = None
        self._openings: dict[int, int] = {}  # number of ranges by worker
        self._opened = 0  # number of ranges
        self._first = self._end = 0  # of the range
        self._next_ticket: dict[int, int] = {}  # of each worker, or of all
        self._updates: list[Update] = []
        self._updates_from = 0  # version before the first of them
        self._losses: dict[int, dict[int, float]] = {}  # shares by ticket and worker
        self._versions: dict[int, tuple[int, ...]] = {}  # by ticket
        self._not_finite: int | None = None  # the first ticket that was not
        self._gathered: dict[str, dict[int, Message]] = {}
        self._left_to_fetch: dict[str, int] = {}
        self._left: set[int] = set()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The calls that it answers, by name."""
        return {
            "open": lambda message: _done(self.open, message),
            "take": lambda message: _answer(self.take(**message.values)),
            "commit": lambda message: _answer(self.commit(**message.values)),
            "result": lambda message: _answer(self.result()),
            "updates": lambda message: _answer(self.updates(**message.values)),
            "gather": lambda message: self.gather(message, **message.values),
            "leave": lambda message: _done(self.leave, message),
            "have_left": lambda message: _answer(self.have_left(**message.values)),
        }

    def open(self, worker: int, first: int, end: int) -> None:
        """Opens the tickets from `first` to `end`; every worker calls it, after it has pulled version `first`.

        Worker 0 opens them, after it has written to the servers what was changed between the ranges; the others wait for it,
        and it waits for them: they may not have seen the result of the range before.
        """
        with self._changed:
            number = self._openings[worker] = self._openings.get(worker, 0) + 1
            self._changed.notify_all()
            if worker:
                self._changed.wait_for(lambda: self._opened == number)
                return
            self._changed.wait_for(lambda: all(self._openings.get(each) == number for each in range(self._workers)))
            if self._order is None or self._order.version != first:
                workers = range(self._workers)
                self._order = (
                    Synchronous(workers, first, first) if self._synchronous else Asynchronous(self._bound, first)
                )
            self._opened, self._first, self._end, self._not_finite = number, first, end, None
            self._next_ticket = dict.fromkeys(range(self._workers) if self._synchronous else [0], first)
            self._losses.clear()
            self._versions.clear()
            # All servers have applied these, or no worker could have pulled that version from them.
            self._updates, self._updates_from = [], first
            self._changed.notify_all()

    def take(self, worker: int) -> tuple[int, int] | None:
        """Returns a worker's next ticket, and the version to compute it from, once the rule admits that it reads it.

        A ticket is dealt only then, the lowest one first: with a bound of 0, updates are in the order of tickets. None if
        there is none left in the range, or the run has ended.
        """
        dealer = worker if self._synchronous else 0
        with self._changed:
            order = self._order
            assert order is not None
            self._changed.wait_for(
                lambda: (
                    self._not_finite is not None
                    or self._next_ticket[dealer] == self._end
                    or order.may_read(worker, self._next_ticket[dealer])
                )
            )
            ticket = self._next_ticket[dealer]
            if self._not_finite is not None or ticket == self._end:
                return None
            self._next_ticket[dealer] += 1
            return ticket, order.read(worker, ticket)

    def commit(self, worker: int, ticket: int, loss: float, is_finite: bool, versions: Sequence[int] = ()) -> bool:
        """Orders the update of a gradient that all servers have, as soon as the rule admits it.

        Args:
          worker: rank of the worker.
          ticket: its ticket.
          loss: the loss, or the worker's share of it.
          is_finite: whether loss and gradient are finite; otherwise the run ends, without this update.
          versions: version of the weights of each server that the gradient was computed from.

        Returns:
          Whether the run goes on.
        """
        with self._changed:
            assert self._order is not None
            self._losses.setdefault(ticket, {})[worker] = loss
            self._versions[ticket] = tuple(versions)
            if not is_finite and self._not_finite is None:
                self._not_finite = ticket
            if self._not_finite is None:
                self._order.push(worker, ticket)
                while (update := self._order.next_update()) is not None:
                    of_one = len(update.workers) == 1
                    self._updates.append(
                        update._replace(versions=self._versions.pop(update.ticket)) if of_one else update
                    )
            self._changed.notify_all()
            return self._not_finite is None

    def result(self) -> RangeResult:
        """Returns the result of the range, once all updates are ordered or the run has ended."""
        with self._changed:
            order = self._order
            assert order is not None
            self._changed.wait_for(lambda: self._not_finite is not None or order.version == self._end)
            last = self._end - 1 if self._not_finite is None else self._not_finite
            # A ticket before one that is not finite may be missing: another worker has not finished it.
            known = {ticket: sum(shares[w] for w in sorted(shares)) for ticket, shares in self._losses.items()}
            losses = [known.get(ticket, np.nan) for ticket in range(self._first, last + 1)]
            return RangeResult(losses, list(self._updates), self._not_finite is None)

    def updates(self, version: int, seconds: float) -> list[Update]:
        """Returns the updates after a version, waiting for the first one for at most some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._updates_from + len(self._updates) > version, seconds)
            return self._updates[max(version - self._updates_from, 0) :]

    def gather(self, message: Message, key: str, member: int, members: int) -> Message:
        """Returns the arrays of all members, in order, once all have called it with this key.

        Args:
          message: the call, with this member's arrays.
          key: names the operation; used once.
          member: number of the caller, in [0, members).
          members: number of callers.
        """
        with self._changed:
            arrived = self._gathered.setdefault(key, {})
            arrived[member] = message
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(arrived) == members)
            left = self._left_to_fetch[key] = self._left_to_fetch.get(key, members) - 1
            if not left:
                del self._gathered[key], self._left_to_fetch[key]
        arrays = [array for each in range(members) for array in arrived[each].arrays]
        return Message({}, arrays)

    def leave(self, member: int) -> None:
        """Takes note that a process needs this one no longer: a worker, by its rank, or a server, numbered after these."""
        with self._changed:
            self._left.add(member)
            self._changed.notify_all()

    def have_left(self, members: int, seconds: float) -> bool:
        """Returns whether that many processes have left, the workers first, waiting for that for at most some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left >= {*range(members)}, seconds)


def _answer(value: Any) -> Message:
    return Message({"value": value})


def _done(method: Callable[..., None], message: Message) -> Message:
    method(**message.values)
    return _answer(None)
