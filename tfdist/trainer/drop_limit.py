"""Chooses after how many seconds a late rank begins no further micro-step, from times that were measured."""

from typing import NamedTuple

import numpy as np

LEAST_GAIN = 0.05  # of rows per second, for rows to be dropped at all
MOST_DROPPED = 0.1  # fraction of the micro-steps
_NEARLY = 0.9  # of the largest gain
_CANDIDATES = 200


class Limit(NamedTuple):
    """A limit and what is expected of it.

    Attributes:
      seconds: no micro-step begins later than this in a step.
      dropped: expected fraction of the micro-steps that are left out, in [0, 1).
      gain: expected increase of the rows per second, as a fraction.
    """

    seconds: float
    dropped: float
    gain: float


def fastest_limit(ends: np.ndarray, other: float) -> Limit | None:
    """Returns the limit with which ranks would have computed the most rows per second, as in algorithm 2 of DropCompute.

    With a limit, rank n computes k_n micro-steps of a step, the first and each that begins earlier than the limit, and a step
    takes max_n(ends[n, k_n - 1]) + other seconds. The speed is the sum of all k_n over that of all steps' seconds. What the
    paper maximizes is the mean of the steps' speeds. Here, a limit that leaves out more than `MOST_DROPPED` is not considered,
    and of limits that gain nearly as much, the largest is taken.

    Args:
      ends: [steps, ranks, micro-steps]; seconds from the arrival of the batch to the end of each micro-step, ascending.
      other: seconds of a step besides those of the slowest rank: sums over replicas, and the update.

    Returns:
      The limit; None if none increases the speed by `LEAST_GAIN`.
    """
    whole = _speed(ends, other, np.inf)
    found = [_expected(ends, other, float(limit), whole) for limit in _candidates(ends)]
    allowed = [limit for limit in found if limit.dropped <= MOST_DROPPED and limit.gain >= LEAST_GAIN]
    most = max((limit.gain for limit in allowed), default=0.0)
    # A larger limit drops less if all steps become slower later.
    return max((limit for limit in allowed if limit.gain >= _NEARLY * most), default=None)


def _candidates(ends: np.ndarray) -> np.ndarray:
    """Returns the times after which ranks could stop, or evenly spread ones if there are many."""
    times = np.unique(ends[..., :-1])
    return times if len(times) <= _CANDIDATES else np.unique(np.quantile(times, np.linspace(0, 1, _CANDIDATES)))


def _expected(ends: np.ndarray, other: float, limit: float, whole: float) -> Limit:
    computed = _computed(ends, limit)
    return Limit(limit, 1 - float(computed.mean()) / ends.shape[-1], _speed(ends, other, limit) / whole - 1)


def _computed(ends: np.ndarray, limit: float) -> np.ndarray:
    """Returns [steps, ranks], the number of micro-steps that each rank computes."""
    return 1 + (ends[..., :-1] < limit).sum(axis=-1)


def _speed(ends: np.ndarray, other: float, limit: float) -> float:
    computed = _computed(ends, limit)
    stops = np.take_along_axis(ends, computed[..., None] - 1, axis=-1)[..., 0]
    return float(computed.sum() / (stops.max(axis=1) + other).sum())
