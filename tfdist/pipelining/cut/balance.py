"""Cuts a sequence into contiguous parts of about equal cost. Does not import TensorFlow."""

import dataclasses
from collections.abc import Sequence

import numpy as np

SLACK = 0.05  # of the smallest possible cost of the most expensive stage, which is given up for fewer bytes


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of parts of a sequence of n elements: stage s from element i to before j costs `joint[i, j] + weights[s]
    * sum(single[i:j])`.

    Attributes:
      joint: [n + 1, n + 1]; costs that are not sums over elements, such as of shared variables.
      single: [n].
      weights: one per stage.
    """

    joint: np.ndarray
    single: np.ndarray
    weights: Sequence[float]

    def of(self, stage: int) -> np.ndarray:
        """Returns the cost of one stage from i to before j, as [n + 1, n + 1]; inf where it would be empty."""
        total = np.concatenate([[0.0], np.cumsum(self.single)])
        costs = self.joint + self.weights[stage] * (total[None, :] - total[:, None])
        n = len(total)
        return np.where(np.arange(n)[:, None] < np.arange(n)[None, :], costs, np.inf)


def balanced(costs: Costs, crossing: np.ndarray, allowed: np.ndarray) -> list[int] | None:
    """Returns where the stages begin, except the first: the indices of the elements before which is cut.

    The highest cost of a stage is at most 5% above the least possible; under this condition, the fewest bytes cross in
    total. O(stages * n^2) by dynamic programming.

    Args:
      costs: costs of n elements.
      crossing: [n + 1]; bytes that cross a cut before each element.
      allowed: [n + 1] bool; before which elements may be cut.

    Returns:
      stages - 1 ascending indices; None if there are not enough places.
    """
    stages, n = len(costs.weights), len(costs.single)
    tables = [costs.of(stage) for stage in range(stages)]
    highest = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    for stage, table in enumerate(tables):
        highest = np.maximum(highest[:, None], table).min(axis=0)
        if stage < stages - 1:
            highest = np.where(allowed, highest, np.inf)
    if not np.isfinite(highest[n]):
        return None
    limit = highest[n] * (1 + SLACK)
    sent = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    highest, origins = sent.copy(), []
    for stage, table in enumerate(tables):
        worst = np.maximum(highest[:, None], table)
        bytes_so_far = np.where(worst <= limit, sent[:, None], np.inf)
        least = bytes_so_far.min(axis=0)
        origin = np.where(bytes_so_far == least, worst, np.inf).argmin(axis=0)
        origins.append(origin)
        sent, highest = least + crossing, np.where(np.isfinite(least), worst[origin, np.arange(n + 1)], np.inf)
        if stage < stages - 1:
            sent, highest = np.where(allowed, sent, np.inf), np.where(allowed, highest, np.inf)
    places, end = [], n
    for origin in reversed(origins):
        end = int(origin[end])
        places.append(end)
    return places[::-1][1:]
