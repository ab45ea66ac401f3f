"""Allocates the rows of batches to replicas: evenly, by weights, or by measured speed."""

import logging
from statistics import median
from typing import Any

import numpy as np

from tfdist.config.balance import MEASURED, WEIGHTS, Balance, parse_balance
from tfdist.coordination.group import LONG_SECONDS
from tfdist.data.row_partition import EVEN, ChangingAllocation, RowAllocation, apportion
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, count_of
from tfdist.trainer.train_state import OBSERVED_STEPS, ReplicaSpeeds, TrainState

_log = logging.getLogger(__name__)


class FixedRowAllocator:
    """An allocation of rows that does not change during a run."""

    def __init__(self, allocation: RowAllocation):
        self.allocation = allocation  # allocation of training batches

    def allocation_at(self, step: int) -> RowAllocation:
        """Returns the allocation of a step."""
        return self.allocation

    def next_change(self, step: int) -> int | None:
        """Returns the next step from which the allocation changes, where a call must end; None if no change is scheduled."""
        return None

    def observe_call(self, step: int, steps: int, busy_seconds: np.ndarray) -> None:
        """Observes a call of the compiled loop, and may change the allocation; every process must call this method.

        The call had `steps` steps, and `step` is the number of completed updates. `busy_seconds`, [local replicas], are the
        seconds that each replica spent computing gradients.
        """


class MeasuredRowAllocator(FixedRowAllocator):
    """An allocation by measured speed, which rank 0 determines for all ranks.

    The speeds are part of the `TrainState`. An observation is the median time per step over the calls of `OBSERVED_STEPS`
    steps. It excludes collectives, because replicas wait for each other in them.
    """

    def __init__(self, strategy: Strategy, state: TrainState, batch_size: int):
        self._strategy = strategy
        speeds = state.speeds or ReplicaSpeeds.initial(state.step, batch_size, strategy.replicas)
        self._speeds = state.speeds = speeds.resume(state.step, batch_size, strategy.replicas)
        changes = [(allocation.step, allocation.counts) for allocation in self._speeds.allocations]
        self._allocation = ChangingAllocation(state.step, changes)
        self._step_seconds: list[np.ndarray] = []  # seconds per step of each local replica, by call
        self._steps = 0
        self._is_first_call = True  # the first call has additional costs, such as memory allocation
        super().__init__(self._allocation)

    def allocation_at(self, step: int) -> RowAllocation:
        allocations = reversed(self._speeds.allocations)
        return RowAllocation(next(allocation.counts for allocation in allocations if allocation.step <= step))

    def next_change(self, step: int) -> int | None:
        start = self._speeds.allocations[-1].step
        return start if start > step else None

    def observe_call(self, step: int, steps: int, busy_seconds: np.ndarray) -> None:
        if self._is_first_call or step <= self._speeds.allocations[-1].step:
            self._is_first_call = step <= self._speeds.allocations[-1].step  # the next call has another allocation
            return
        self._step_seconds.append(busy_seconds / steps)
        self._steps += steps
        if self._steps >= OBSERVED_STEPS:
            self._update_allocation()
            self._step_seconds, self._steps = [], 0

    def _update_allocation(self) -> None:
        local_times = [median(times) for times in np.stack(self._step_seconds).T.tolist()]
        group, speeds = self._strategy.group, self._speeds
        with self._allocation.pause() as first_free_step:
            answers: Any = group.gather("balance/times", [first_free_step, local_times], LONG_SECONDS)
            times = [seconds for _, rank_times in answers for seconds in rank_times]
            if not all(times):
                return  # some device reported no time
            speeds.observe(times)
            proposal = speeds.propose() if group.rank == 0 else None
            counts: Any = group.broadcast("balance/allocation", proposal, LONG_SECONDS)
            if counts is None:
                return
            start = max(first for first, _ in answers)
            if self._strategy.is_chief:
                _log.info("%s", _describe_change(speeds, counts, start))
            self._allocation.change(start, counts)
        speeds.change(start, counts)
        self._is_first_call = True


def _describe_change(speeds: ReplicaSpeeds, counts: list[int], step: int) -> str:
    previous_counts, medians = speeds.counts, speeds.allocations[-1].medians()
    replicas = range(len(counts)) if len(counts) <= 8 else (medians.index(max(medians)), medians.index(min(medians)))
    changes = [f"{previous_counts[i]} to {counts[i]} for replica {i} ({1e3 * medians[i]:.3g} ms)" for i in replicas]
    return (
        f"From step {step}, the rows of a batch are divided by speed: {', '.join(changes)}. The slowest replica is expected to "
        f"take {1e3 * speeds.expected_seconds(counts):.3g} instead of {1e3 * max(medians):.3g} ms per step."
    )


def make_row_allocator(balance: Balance, strategy: Strategy, state: TrainState, batch_size: int) -> FixedRowAllocator:
    """Returns the allocator that `balance` specifies."""
    if balance.kind == MEASURED and strategy.replicas > 1:
        return MeasuredRowAllocator(strategy, state, batch_size)
    state.speeds = None
    return FixedRowAllocator(RowAllocation(apportion(batch_size, balance.weights)) if balance.kind == WEIGHTS else EVEN)


def validate_balance(text: str, strategy: Strategy) -> Balance:
    """Parses a value of `--balance`; raises `InputError` if it is invalid or does not have one weight per replica."""
    try:
        balance = parse_balance(text)
    except InputError as error:
        raise InputError(f"--balance: {error}.") from error
    if balance.weights and len(balance.weights) != strategy.replicas:
        raise InputError(
            f"--balance=weights(...) requires one weight per replica. Received: --balance={text} and "
            f"{count_of(strategy.replicas, 'replica')}. Use --balance=measured for any number of replicas."
        )
    return balance
