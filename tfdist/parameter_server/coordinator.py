"""The coordinator of a job with parameter servers: deals steps, admits reads, and orders updates. It runs on server 0."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.errors import PeerLostError
from tfdist.parameter_server.messages import Handler, Message
from tfdist.parameter_server.update_order import Asynchronous, Synchronous, Update, UpdateOrder

_NONE = np.zeros([0], np.int64)


class RangeResult(NamedTuple):
    """What a range of tickets has resulted in.

    Attributes:
      losses: of each ticket, in order; the last one is not finite if `is_finite` is False.
      updates: in their order.
      is_finite: whether all losses and gradients were finite.
      norm: gradient norm of the last ticket, if its worker has computed it.
      numbers: for worker 0, the indices of the examples of each ticket.
      metrics: for worker 0, the sums of the workers' values of metrics in this range.
    """

    losses: Sequence[float]
    updates: Sequence[Update]
    is_finite: bool
    norm: float = 0.0
    numbers: Sequence[np.ndarray] = ()
    metrics: Sequence[np.ndarray] = ()


class _Gather:
    """The arrays of one `gather`.

    Attributes:
      arrived: the calls by member.
      answer: the result, once it is known.
      fetched: number of calls that have returned it.
    """

    def __init__(self) -> None:
        self.arrived: dict[int, Message] = {}
        self.answer: Message | None = None
        self.fetched = 0


class Coordinator:
    """Serves all workers and servers; its methods are called from several threads, and some of them wait.

    A ticket is the work of one update: ticket k uses the rows of step k. Workers open a range of tickets, compute those that
    they take, and wait for its end, when all are applied: a record, an evaluation or a checkpoint after it misses nothing.

    The ticket of a lost worker is dealt again, unless it has committed: then all servers have its gradient. Servers act on the
    order of updates alone, so that a gradient is applied by all of them or by none.
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
        self._dealt: dict[int, int] = {}  # tickets that are being computed, by worker
        self._returned: set[int] = set()  # tickets of lost workers, to be dealt again
        self._lost: set[int] = set()  # workers
        self._numbers: dict[int, dict[int, np.ndarray]] = {}  # indices of examples by ticket and worker
        self._metrics: dict[int, Sequence[np.ndarray]] = {}  # by worker
        self._updates: list[Update] = []
        self._updates_from = 0  # version before the first of them
        self._losses: dict[int, dict[int, float]] = {}  # shares by ticket and worker
        self._versions: dict[int, tuple[int, ...]] = {}  # by ticket
        self._norm = 0.0
        self._not_finite: int | None = None  # the first ticket that was not
        self._gathers: dict[str, _Gather] = {}
        self._left: set[int] = set()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The calls that it answers, by name."""
        return {
            "open": lambda message: _done(self.open, message),
            "take": lambda message: _answer(self.take(**message.values)),
            "commit": lambda message: _answer(self.commit(**message.values, arrays=message.arrays)),
            "result": lambda message: _result_message(self.result(**message.values)),
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
                self._wait(worker, lambda: self._opened == number)
                return
            self._changed.wait_for(
                lambda: all(self._openings.get(rank) == number for rank in {*range(self._workers)} - self._lost)
            )
            if self._order is None or self._order.version != first:
                workers = range(self._workers)
                self._order = (
                    Synchronous(workers, first, first) if self._synchronous else Asynchronous(self._bound, first)
                )
            self._opened, self._first, self._end, self._not_finite = number, first, end, None
            self._next_ticket = dict.fromkeys(range(self._workers) if self._synchronous else [0], first)
            for values in (self._losses, self._versions, self._numbers, self._metrics):
                values.clear()
            # All servers have applied these, or no worker could have pulled that version from them.
            self._updates, self._updates_from = [], first
            self._changed.notify_all()

    def take(self, worker: int) -> tuple[int, int, list[int]] | None:
        """Returns a worker's next ticket, the version to compute it from, and all tickets that are being computed.

        A ticket is dealt once the rule admits that the worker reads that version, the lowest one first: with a bound of 0,
        updates are in the order of tickets. None if all tickets are committed, or the run has ended: before, one may be dealt
        again because its worker is lost.
        """
        dealer = worker if self._synchronous else 0

        def next_ticket() -> int:
            return min({self._next_ticket[dealer], *self._returned})

        def is_over() -> bool:
            return self._not_finite is not None or (next_ticket() == self._end and not self._dealt)

        with self._changed:
            order = self._order
            assert order is not None
            self._wait(
                worker, lambda: is_over() or (next_ticket() < self._end and order.may_read(worker, next_ticket()))
            )
            if is_over():
                return None
            ticket = self._dealt[worker] = next_ticket()
            if ticket in self._returned:
                self._returned.remove(ticket)
            else:
                self._next_ticket[dealer] += 1
            return ticket, order.read(worker, ticket), [*self._dealt.values(), *self._returned]

    def commit(
        self,
        worker: int,
        ticket: int,
        loss: float,
        is_finite: bool,
        versions: Sequence[int] = (),
        norm: float = 0.0,
        arrays: Sequence[np.ndarray] = (),
    ) -> bool:
        """Orders the update of a gradient that all servers have, as soon as the rule admits it.

        Args:
          worker: rank of the worker.
          ticket: its ticket.
          loss: the loss, or the worker's share of it.
          is_finite: whether loss and gradient are finite; otherwise the run ends, without this update.
          versions: version of the weights of each server that the gradient was computed from.
          norm: gradient norm, if it was requested.
          arrays: indices of the examples, and the worker's values of metrics since the range was opened.

        Returns:
          Whether the run goes on.
        """
        with self._changed:
            assert self._order is not None
            self._check_not_lost(worker)
            del self._dealt[worker]
            if arrays:
                self._numbers.setdefault(ticket, {})[worker], *self._metrics[worker] = arrays
            self._losses.setdefault(ticket, {})[worker] = loss
            self._versions[ticket] = tuple(versions)
            self._norm = norm if ticket == self._end - 1 else self._norm
            if not is_finite and self._not_finite is None:
                self._not_finite = ticket
            if self._not_finite is None:
                self._order.push(worker, ticket)
                self._add_updates(self._order)
            self._changed.notify_all()
            return self._not_finite is None

    def result(self, worker: int = 0) -> RangeResult:
        """Returns the result of the range to a worker, once all updates are ordered or the run has ended."""
        with self._changed:
            order = self._order
            assert order is not None
            self._wait(worker, lambda: self._not_finite is not None or order.version == self._end)
            last = self._end - 1 if self._not_finite is None else self._not_finite
            tickets = range(self._first, last + 1)
            # A ticket before one that is not finite may be missing: another worker has not finished it.
            known = {ticket: sum(_by_worker(shares)) for ticket, shares in self._losses.items()}
            result = RangeResult(
                [known.get(ticket, np.nan) for ticket in tickets],
                list(self._updates),
                self._not_finite is None,
                self._norm,
            )
            if worker:
                return result
            # Of lost workers, too.
            numbers = [np.concatenate([_NONE, *_by_worker(self._numbers.get(ticket, {}))]) for ticket in tickets]
            metrics = [np.asarray(sum(values)) for values in zip(*_by_worker(self._metrics), strict=True)]
            return result._replace(numbers=numbers, metrics=metrics)

    def forget(self, worker: int) -> None:
        """Gives the ticket of a lost worker back, and waits for it no longer; its later calls fail."""
        with self._changed:
            self._lost.add(worker)
            if (ticket := self._dealt.pop(worker, None)) is not None:
                self._returned.add(ticket)
                assert self._order is not None
                self._order.withdraw(worker)
                self._add_updates(self._order)  # those of gradients that waited for it
            self._changed.notify_all()

    def updates(self, version: int, seconds: float) -> list[Update]:
        """Returns the updates after a version, waiting for the first one for at most some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._updates_from + len(self._updates) > version, seconds)
            return self._updates[max(version - self._updates_from, 0) :]

    def gather(self, message: Message, key: str, member: int, members: int | None = None) -> Message:
        """Returns the arrays of all members, in order, once all have called it with this key.

        Args:
          message: the call, with this member's arrays.
          key: names the operation; used once.
          member: number of the caller, in [0, members).
          members: number of callers; None for the workers that are not lost, whose numbers are the value `members`.
        """
        with self._changed:
            if members is None:
                self._check_not_lost(member)
            gather = self._gathers.setdefault(key, _Gather())
            gather.arrived[member] = message
            self._changed.notify_all()
            living = range(self._workers if members is None else members)
            self._changed.wait_for(
                lambda: gather.answer or gather.arrived.keys() >= {*living} - (self._lost if members is None else set())
            )
            if not gather.answer:  # the same for all
                arrived = sorted(gather.arrived)
                arrays = [array for caller in arrived for array in gather.arrived[caller].arrays]
                gather.answer = Message({"members": arrived}, arrays)
                self._changed.notify_all()
            gather.fetched += 1
            if gather.fetched == len(gather.arrived):
                del self._gathers[key]
            return gather.answer

    def leave(self, member: int) -> None:
        """Takes note that a process needs this one no longer: a worker, by its rank, or a server, numbered after these."""
        with self._changed:
            self._left.add(member)
            self._changed.notify_all()

    def have_left(self, members: int, seconds: float) -> bool:
        """Returns whether that many processes have left, the workers first, waiting for that for at most some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left | self._lost >= {*range(members)}, seconds)

    def _add_updates(self, order: UpdateOrder) -> None:
        while (update := order.next_update()) is not None:
            of_one = len(update.workers) == 1
            self._updates.append(update._replace(versions=self._versions.pop(update.ticket)) if of_one else update)

    def _wait(self, worker: int, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: worker in self._lost or condition())
        self._check_not_lost(worker)

    def _check_not_lost(self, worker: int) -> None:
        if worker in self._lost:
            raise PeerLostError(f"worker {worker} did not answer for too long, and the others go on without it")


def _by_worker(values: Mapping[int, Any]) -> list[Any]:
    return [values[worker] for worker in sorted(values)]


def _result_message(result: RangeResult) -> Message:
    return Message({"value": result[:4]}, [*result.numbers, *result.metrics])


def _answer(value: Any) -> Message:
    return Message({"value": value})


def _done(method: Callable[..., None], message: Message) -> Message:
    method(**message.values)
    return _answer(None)
