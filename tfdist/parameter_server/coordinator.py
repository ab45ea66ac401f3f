"""Coordinates a job with parameter servers on server 0: assigns steps, admits reads and orders updates."""

import collections
import enum
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.config.staleness import DROPPED, REJECT, Staleness
from tfdist.coordination.calls import Handler, Message
from tfdist.errors import PeerLostError
from tfdist.gradients import LossScale
from tfdist.parameter_server.update_order import Asynchronous, Recorded, Synchronous, Update, UpdateOrder

_NO_INDICES = np.zeros([0], np.int64)


class Outcome(enum.IntEnum):
    """What happens to a committed gradient: its update is ordered, or it is too old.

    The ticket of a rejected gradient is computed again. A dropped gradient is an update that changes nothing. An unused share
    arrived after the update from the shares of other workers.
    """

    APPLIED = 1
    REJECTED = 2
    DROPPED = 3
    UNUSED = 4


class RangeResult(NamedTuple):
    """The result of a range of tickets."""

    losses: Sequence[float]  # loss of each ticket, in order; if `is_finite` is False, the last one is not finite
    updates: Sequence[Update]  # the updates, in order
    is_finite: bool  # whether all losses and gradients were finite
    norm: float = 0.0  # gradient norm of the last ticket, if its worker has computed it
    dropped_rows: int = 0  # number of rows of these tickets that no update has used
    rejections: int = 0  # number of gradients that were rejected or dropped because they were too old
    scale: Sequence[float] = ()  # state of the loss scale; empty without loss scaling
    example_indices: Sequence[np.ndarray] = ()  # indices of the examples of each ticket; only for worker 0
    metrics: Sequence[np.ndarray] = ()  # values of the metric variables, summed over workers; only for worker 0
    # Work of each worker, including lost workers; see `tfdist.synchronization.server_updates.Statistics`.
    work: Sequence[Mapping[str, float]] = ()


class _Commit(NamedTuple):
    """What a worker has committed for a ticket; see `Coordinator.commit`."""

    loss: float
    versions: Sequence[int]
    rows: Sequence[int]
    loss_scale: float
    example_indices: Sequence[np.ndarray]


class Coordinator:
    """Serves all workers and servers. Its methods are called from several threads, and some of them wait.

    A ticket is the work of one update: ticket k uses the rows of step k. Workers open a range of tickets, compute the
    tickets that they take, and wait until all tickets of the range are applied. Log records, evaluations and checkpoints
    follow a complete range.

    The ticket of a lost worker is assigned again, unless the worker has committed it, because then all servers have its
    gradient. Servers apply only ordered updates, so a gradient is applied by all servers or by none.
    """

    def __init__(self, workers: int, staleness: Staleness):
        self._workers, self._staleness = workers, staleness
        self._is_synchronous = not staleness.whole_batches
        self._changed = threading.Condition()
        self._order: UpdateOrder = Synchronous(0, -1)  # until the first range begins
        self._range_counts: collections.Counter[int] = collections.Counter()  # number of opened ranges, by worker
        self._range_count = 0  # number of opened ranges; the last one is the current range
        self._active_tickets: dict[int, int] = {}  # by worker
        self._lost_workers: set[int] = set()
        self._work = [collections.defaultdict[str, float](float) for _ in range(workers)]
        self._wait_starts: dict[int, float] = {}  # by waiting worker
        self._updates: list[Update] = []
        self._first_version = 0  # version of the weights before the first of these updates
        self._norm = 0.0
        self._gathers: dict[str, dict[int, Message]] = {}  # by key and member
        self._gather_answers: collections.Counter[str] = collections.Counter()  # calls that have returned, by key
        self._begin_range(0, 0, None, (), 0)

    def _begin_range(
        self, first: int, end: int, loss_scale: LossScale | None, scale: Sequence[float], max_skipped_steps: int
    ) -> None:
        self._first_ticket, self._end_ticket = first, end
        self._failed_ticket: int | None = None  # the first ticket that was not finite
        self._next_ticket = dict.fromkeys(range(self._workers), first)  # by worker; for whole tickets, only worker 0's
        self._abandoned_tickets: set[int] = set()  # of lost workers and rejected gradients, to be assigned again
        self._overflowed_tickets: set[int] = set()  # with a loss scale, the tickets that were not finite
        self._commits: dict[int, dict[int, _Commit]] = collections.defaultdict(dict)  # by ticket and worker
        self._losses: dict[int, float] = {}  # by ticket
        self._metrics: dict[int, Sequence[np.ndarray]] = {}  # by worker
        self._dropped_rows = self._rejections = 0
        self._loss_scale, self._scale, self._max_skipped_steps = loss_scale, scale, max_skipped_steps

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of calls, by name."""
        methods = (self.open, self.clear_updates, self.take, self.updates)

        def answer(method: Callable[..., Any], message: Message) -> Message:
            return Message({"value": method(**message.values)})

        return {method.__name__: functools.partial(answer, method) for method in methods} | {
            "commit": lambda message: Message({"value": self.commit(**message.values, arrays=message.arrays)}),
            "result": lambda message: _result_message(self.result(**message.values)),
            "gather": lambda message: self.gather(message, **message.values),
        }

    def open(
        self,
        worker: int,
        first: int,
        end: int,
        updates: Sequence[Sequence[Any]] = (),
        loss_scale: Mapping[str, Any] | None = None,
        scale: Sequence[float] = (),
        max_skipped_steps: int = 0,
    ) -> None:
        """Opens the tickets in [first, end); every worker must call it, after pulling version `first`.

        Worker 0 opens them, after writing changes of variables to the servers. All workers wait for each other, because some
        may not have the result of the previous range yet.

        Args:
          worker: rank of the worker. The other arguments have an effect only in the call of worker 0.
          first: the first ticket.
          end: the ticket after the last one.
          updates: in a replay, the updates to repeat.
          loss_scale: fields of a `LossScale`; None for no loss scaling.
          scale: its state.
          max_skipped_steps: number of consecutive skipped updates that ends training.
        """
        with self._changed:
            self._range_counts[worker] += 1
            number = self._range_counts[worker]
            self._changed.notify_all()
            if worker:
                self._wait(worker, lambda: self._range_count == number)
                return
            for work in self._work:
                work.clear()
            self._wait_starts = dict.fromkeys(self._wait_starts, time.perf_counter())
            self._wait(worker, lambda: all(self._range_counts[rank] == number for rank in self._remaining_workers()))
            has_failed = self._failed_ticket is not None  # the order may then have shares without an update
            if updates:
                self._order = Recorded([Update(*update) for update in updates])
            elif not self._is_synchronous:  # workers must not use weights of an earlier range again
                late = self._staleness.late
                max_age = late.after if late.kind == REJECT else None
                self._order = Asynchronous(
                    self._staleness.bound, first, pull_every=self._staleness.pull_every, max_age=max_age
                )
            elif self._order.version != first or has_failed:
                needed_shares = self._staleness.needed_shares(self._workers)
                self._order = Synchronous(needed_shares, first, bound=self._staleness.bound or 0)
            self._range_count = number
            self._begin_range(first, end, LossScale(**loss_scale) if loss_scale else None, scale, max_skipped_steps)
            # All servers have applied the previous updates: a worker has pulled this version from each.
            self._updates, self._first_version = [], first
            self._changed.notify_all()

    def _remaining_workers(self) -> set[int]:
        return {*range(self._workers)} - self._lost_workers

    def clear_updates(self) -> None:
        """Removes the updates of a range, which all servers have applied, before the version of the servers is set."""
        with self._changed:
            self._updates, self._first_version = [], 0

    def take(self, worker: int) -> tuple[int, int | Sequence[int] | None, list[int], Sequence[float]] | None:
        """Returns a worker's next ticket, the version to compute it from, all uncommitted tickets, and the loss scale.

        Waits until the worker may read that version. The lowest ticket is assigned first, so with a bound of 0, updates are in
        the order of tickets. Returns None when no ticket is left. If workers compute whole tickets, that is when all are
        committed or training has ended: a ticket of a lost worker or a rejected gradient may be assigned again until then.

        The version is a minimum, or None if the worker must keep its weights. In a replay, it is the exact version of each
        server. The loss scale is returned as its state.
        """
        counter_key = worker if self._is_synchronous else 0

        def next_ticket() -> int:
            if isinstance(order, Recorded):
                return next(iter(order.remaining_tickets(worker)), self._end_ticket)
            if self._is_synchronous:  # tickets may be complete without this worker
                return max(self._next_ticket[worker], order.version)
            return min({self._next_ticket[counter_key], *self._abandoned_tickets})

        def is_over() -> bool:
            if self._is_synchronous:
                return next_ticket() >= self._end_of_updates
            is_replayed = isinstance(order, Recorded)
            is_done = next_ticket() == self._end_ticket and (is_replayed or not self._active_tickets)
            return self._has_ended or is_done

        with self._changed:
            order = self._order
            self._wait(
                worker,
                lambda: is_over() or (next_ticket() < self._end_ticket and order.may_read(worker, next_ticket())),
            )
            if is_over():
                return None
            ticket = self._active_tickets[worker] = next_ticket()
            keeps_weights = order.keeps_weights(worker)
            if isinstance(order, Recorded):
                order.read(worker, ticket)
                update = order.update_of(ticket)
                versions, scale = None if keeps_weights else update.versions, [update.loss_scale, *self._scale[1:]]
                return ticket, versions, [ticket, *order.remaining_tickets(worker)], scale
            if ticket in self._abandoned_tickets:
                self._abandoned_tickets.remove(ticket)
            else:
                self._next_ticket[counter_key] = ticket + 1
            version = order.read(worker, ticket)
            active_tickets = [*self._active_tickets.values(), *self._abandoned_tickets]
            return ticket, None if keeps_weights else version, active_tickets, self._scale

    def commit(
        self,
        worker: int,
        ticket: int,
        loss: float,
        is_finite: bool,
        versions: Sequence[int] = (),
        norm: float = 0.0,
        work: Mapping[str, float] = MappingProxyType({}),
        rows: Sequence[int] = (1, 1),
        loss_scale: float = 0.0,
        arrays: Sequence[np.ndarray] = (),
    ) -> Outcome:
        """Orders the update of a gradient that all servers have; returns its outcome by the rule of `--staleness`.

        Args:
          worker: rank of the worker.
          ticket: ticket of the gradient.
          loss: the loss, or the share of the loss that this worker computed.
          is_finite: whether loss and gradient are finite. If not, the update is skipped when its turn comes; without a loss
            scale, training ends.
          versions: for each server, version of the weights from which the gradient was computed.
          norm: gradient norm, if it was requested.
          work: the worker's work since its last commit.
          rows: numbers of rows of the share and of the ticket.
          loss_scale: see `Update`.
          arrays: indices of the examples, and the worker's metric variables since the range was opened.
        """
        with self._changed:
            order = self._order
            self._check_alive(worker)
            del self._active_tickets[worker]
            for name, value in work.items():
                self._work[worker][name] += value
            outcome = self._outcome(ticket, versions)
            self._rejections += outcome == Outcome.REJECTED or (outcome == Outcome.DROPPED and is_finite)
            if outcome == Outcome.REJECTED:
                # The worker's weights are too old to be used again. A rejection follows an update since they were read, and a
                # range has a limited number of updates, so that each of its tickets is applied in the end.
                order.withdraw(worker)
                self._abandoned_tickets.add(ticket)
            elif outcome != Outcome.UNUSED:
                self._commits[ticket][worker] = _Commit(loss, versions, rows, loss_scale, arrays[:1])
                self._losses[ticket] = sum(commit.loss for commit in self._commits_of(ticket))
                if arrays and outcome == Outcome.APPLIED:
                    self._metrics[worker] = arrays[1:]
                self._norm = norm if ticket == self._end_ticket - 1 else self._norm
                if not is_finite and self._loss_scale:
                    self._overflowed_tickets.add(ticket)
                elif not is_finite and outcome == Outcome.APPLIED and self._is_needed(ticket):
                    self._failed_ticket = ticket
                if self._is_needed(ticket):
                    order.push(worker, ticket, rows[0])
                    self._add_updates(order)
            self._changed.notify_all()
            return outcome

    def _commits_of(self, ticket: int) -> list[_Commit]:
        return _sorted_by_worker(self._commits[ticket])

    def _outcome(self, ticket: int, versions: Sequence[int]) -> Outcome:
        order = self._order
        if self._is_synchronous:
            return Outcome.UNUSED if ticket < order.version else Outcome.APPLIED
        if isinstance(order, Recorded):
            return Outcome.APPLIED if order.update_of(ticket).factor else Outcome.DROPPED
        late = self._staleness.late
        if not versions or late.factor(order.version - min(versions)):
            return Outcome.APPLIED
        return Outcome.DROPPED if late.rows == DROPPED else Outcome.REJECTED

    def result(self, worker: int = 0) -> RangeResult:
        """Waits until all updates of the range are ordered or training has ended; returns the result."""
        with self._changed:
            order = self._order
            self._wait(worker, lambda: order.version >= self._end_of_updates or self._has_ended)
            last = self._end_ticket - 1 if self._failed_ticket is None else self._failed_ticket
            tickets = range(self._first_ticket, last + 1)
            result = RangeResult(
                # Before a ticket that is not finite, another worker may not have finished its ticket.
                [self._losses.get(ticket, np.nan) for ticket in tickets],
                list(self._updates),
                self._failed_ticket is None,
                self._norm,
                self._dropped_rows,
                self._rejections,
                self._scale,
                work=[self._work_of(rank) for rank in range(self._workers)],
            )
            if worker:
                return result
            # Lost workers are included.
            parts = [
                [part for commit in self._commits_of(ticket) for part in commit.example_indices] for ticket in tickets
            ]
            example_indices = [np.concatenate([_NO_INDICES, *ticket_parts]) for ticket_parts in parts]
            metrics = [np.asarray(sum(values)) for values in zip(*_sorted_by_worker(self._metrics), strict=True)]
            return result._replace(example_indices=example_indices, metrics=metrics)

    def forget(self, worker: int) -> None:
        """Makes the ticket of a lost worker available again; later calls by this worker fail."""
        with self._changed:
            self._lost_workers.add(worker)
            if (ticket := self._active_tickets.pop(worker, None)) is not None:
                self._abandoned_tickets.add(ticket)
                self._order.withdraw(worker)
                self._add_updates(self._order)  # gradients may have waited for it
            self._changed.notify_all()

    def updates(self, version: int, seconds: float) -> list[Update]:
        """Returns the updates after a version; waits up to `seconds` for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._first_version + len(self._updates) > version, seconds)
            return self._updates[max(version - self._first_version, 0) :]

    def gather(
        self, message: Message, key: str, member: int, members: int | None = None, receiver: int | None = None
    ) -> Message:
        """Returns the arrays of all members, in order, once all have called it with this unique key.

        If the number of `members` is None, the members are all workers that are not lost. The answer has their ranks as
        `members`. If there is a `receiver`, it is the only member that gets the arrays.
        """
        with self._changed:
            if members is None:
                self._check_alive(member)
            messages = self._gathers.setdefault(key, {})
            messages[member] = message
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: messages.keys() >= (self._remaining_workers() if members is None else {*range(members)})
            )
            self._gather_answers[key] += 1
            if self._gather_answers[key] == len(messages):
                del self._gathers[key], self._gather_answers[key]
            senders = sorted(messages) if receiver in (None, member) else ()
            arrays = [array for sender in senders for array in messages[sender].arrays]
            return Message({"members": sorted(messages)}, arrays)

    @property
    def _end_of_updates(self) -> int:
        """If workers compute shares, the ticket after the last ticket to apply."""
        return self._end_ticket if self._failed_ticket is None else self._failed_ticket

    @property
    def _has_ended(self) -> bool:
        """Whether workers compute whole tickets and must stop, because a ticket is not finite."""
        return self._failed_ticket is not None and not self._is_synchronous

    def _is_needed(self, ticket: int) -> bool:
        """Returns whether to apply a ticket; if workers compute shares, any ticket before one that is not finite is applied."""
        return self._failed_ticket is None or (self._is_synchronous and ticket < self._failed_ticket)

    def _add_updates(self, order: UpdateOrder) -> None:
        while self._is_needed(order.version) and (update := order.next_update()) is not None:
            commits, is_overflowed = self._commits_of(update.ticket), update.ticket in self._overflowed_tickets
            if isinstance(order, Recorded):
                update = update._replace(factor=0.0) if is_overflowed else update
            else:
                versions = tuple(version for commit in commits for version in commit.versions)
                age = update.version - min(versions, default=update.version)
                factor = 0.0 if is_overflowed else self._staleness.late.factor(age)
                share_rows, batch_rows = zip(*(commit.rows for commit in commits), strict=True)
                used_rows, all_rows = sum(share_rows), max(batch_rows)
                self._dropped_rows += all_rows - used_rows
                self._losses[update.ticket] = sum(commit.loss * (all_rows / used_rows) for commit in commits)
                update = Update(*update[:3], versions, factor, all_rows / used_rows, commits[0].loss_scale)
            self._updates.append(update)
            # Concurrent gradients overflow together. The scale has already been reduced for those with a larger scale.
            is_already_reduced = is_overflowed and bool(self._scale) and update.loss_scale > self._scale[0]
            if self._loss_scale and (is_overflowed or update.factor) and not is_already_reduced:
                values = self._loss_scale.next_state(self._scale, not is_overflowed)
                self._scale = [tf.convert_to_tensor(value).numpy().item() for value in values]
                if self._scale[-1] >= self._max_skipped_steps:
                    self._failed_ticket = update.ticket

    def _wait(self, worker: int, condition: Callable[[], bool]) -> None:
        """Waits for a condition that other workers bring about, and adds the time to the worker's work."""
        start_time = self._wait_starts[worker] = time.perf_counter()
        self._changed.wait_for(lambda: worker in self._lost_workers or condition())
        self._work[worker]["workers"] += time.perf_counter() - self._wait_starts.pop(worker, start_time)
        self._check_alive(worker)

    def _work_of(self, worker: int) -> Mapping[str, float]:
        """Returns the work of a worker in this range, including the time of a wait that has not returned yet."""
        work, now = self._work[worker], time.perf_counter()
        return {**work, "workers": work["workers"] + now - self._wait_starts.get(worker, now)}

    def _check_alive(self, worker: int) -> None:
        if worker in self._lost_workers:
            raise PeerLostError(f"worker {worker} did not answer for too long, and the others continue without it")


def _sorted_by_worker(values: Mapping[int, Any]) -> list[Any]:
    return [values[worker] for worker in sorted(values)]


def _result_message(result: RangeResult) -> Message:
    return Message({"value": result[:7], "work": result.work}, [*result.example_indices, *result.metrics])
