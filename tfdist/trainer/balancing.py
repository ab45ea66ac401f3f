"""Allocation of the rows of a run's batches to replicas: evenly, by given weights, or by measured speeds."""

import logging
from statistics import median
from typing import Any

import numpy as np

from tfdist.config.balance import MEASURED, WEIGHTS, Balance, parse_balance
from tfdist.coordination.group import LONG_SECONDS
from tfdist.data.row_partition import EVEN, ChangingAllocation, FixedAllocation, RowAllocation, apportion
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.trainer.train_state import ReplicaSpeeds, TrainState

_log = logging.getLogger(__name__)


class Balancing:
    """An allocation that does not change during a run.

    Attributes:
      allocation: the allocation of training batches.
    """

    def __init__(self, allocation: RowAllocation):
        """Initializes with an allocation."""
        self.allocation = allocation

    def allocation_at(self, step: int) -> RowAllocation:
        """Returns the allocation of one step."""
        return self.allocation

    def next(self, step: int) -> int | None:
        """Returns the next step, after `step`, at which the allocation changes and a call has to end; None if not known."""
        return None

    def after_call(self, step: int, steps: int, busy: np.ndarray) -> None:
        """Observes a call of the compiled loop, and may change the allocation; every process must call it.

        Args:
          step: updates done so far.
          steps: number of steps of the call.
          busy: [local replicas]; seconds that each one needed for its own gradients.
        """


class MeasuredBalancing(Balancing):
    """An allocation by measured speeds, which rank 0 decides for all ranks.

    The speeds are part of the `TrainState`. Times without collectives are compared, because replicas wait for each other
    there; an observation is the median over the calls of some steps.
    """

    def __init__(self, strategy: Strategy, state: TrainState, batch_size: int):
        """Initializes with the speeds of the state, evenly if there are none."""
        self._strategy = strategy
        known = state.speeds or ReplicaSpeeds.begun(state.step, batch_size, strategy.replicas)
        self._speeds = state.speeds = known.on(state.step, batch_size, strategy.replicas)
        self._allocation = ChangingAllocation(
            state.step, [(each.step, each.counts) for each in self._speeds.allocations]
        )
        self._step_seconds: list[np.ndarray] = []  # seconds per step of each local replica, by call
        self._steps = 0
        self._is_first = True  # which has costs of its own, such as memory that is allocated
        super().__init__(self._allocation)

    def allocation_at(self, step: int) -> RowAllocation:
        """See base class."""
        return FixedAllocation(next(each.counts for each in reversed(self._speeds.allocations) if each.step <= step))

    def next(self, step: int) -> int | None:
        """See base class."""
        begins = self._speeds.allocations[-1].step
        return begins if begins > step else None

    def after_call(self, step: int, steps: int, busy: np.ndarray) -> None:
        """See base class."""
        if self._is_first or step <= self._speeds.allocations[-1].step:
            self._is_first = step <= self._speeds.allocations[-1].step  # then so is the next call, with other rows
            return
        self._step_seconds.append(busy / steps)
        self._steps += steps
        if self._steps >= self._speeds.steps:
            self._decide()
            self._step_seconds, self._steps = [], 0

    def _decide(self) -> None:
        own = [median(times) for times in np.stack(self._step_seconds).T.tolist()]
        group, speeds = self._strategy.group, self._speeds
        with self._allocation.paused() as first_free_step:
            everyone: Any = group.gather("balance/times", [first_free_step, own], LONG_SECONDS)
            times = [seconds for _, of_rank in everyone for seconds in of_rank]
            if not all(times):
                return  # a device without a clock
            speeds.observe(times)
            proposed = speeds.propose() if group.rank == 0 else None
            counts: Any = group.broadcast("balance/allocation", proposed, LONG_SECONDS)
            if counts is None:
                speeds.keep()
                return
            begins = max(first for first, _ in everyone)
            if self._strategy.is_chief:
                _log.info("%s", _describe_change(speeds, counts, begins))
            self._allocation.change(begins, counts)
        speeds.change(begins, counts)
        self._is_first = True


def _describe_change(speeds: ReplicaSpeeds, counts: list[int], step: int) -> str:
    before, medians = speeds.counts, speeds.allocations[-1].medians()
    shown = range(len(counts)) if len(counts) <= 8 else (medians.index(max(medians)), medians.index(min(medians)))
    changes = [f"{before[i]} to {counts[i]} for replica {i} ({1e3 * medians[i]:.3g} ms)" for i in shown]
    return (
        f"Rows are allocated by speed from step {step} on: {', '.join(changes)}. The slowest replica is expected to take "
        f"{1e3 * speeds.expected(counts):.3g} instead of {1e3 * max(medians):.3g} ms per step."
    )


def balancing(balance: Balance, strategy: Strategy, state: TrainState, batch_size: int) -> Balancing:
    """Returns how rows are allocated in a run."""
    if balance.kind == MEASURED and strategy.replicas > 1:
        return MeasuredBalancing(strategy, state, batch_size)
    state.speeds = None
    return Balancing(FixedAllocation(apportion(batch_size, balance.weights)) if balance.kind == WEIGHTS else EVEN)


def checked_balance(text: str, strategy: Strategy) -> Balance:
    """Returns the value of a flag or argument, checked for a strategy.

    Raises:
      InputError: it is not valid, or the number of weights is not that of replicas.
    """
    try:
        balance = parse_balance(text)
    except InputError as error:
        raise InputError(f"--balance: {error}.") from error
    if balance.weights and len(balance.weights) != strategy.replicas:
        raise InputError(
            f"--balance=weights(...) needs a weight for each replica. Received: --balance={text} and "
            f"{strategy.replicas} replica{'s'[: strategy.replicas != 1]}. Use --balance=measured for any number of replicas."
        )
    return balance
