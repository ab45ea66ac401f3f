"""What two sides' paired times say: the ratio of their medians, and how far chance may have moved it."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Ratio(NamedTuple):
    """The median of one side over that of another, with the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def inverse(self) -> "Ratio":
        """The same, seen from the other side."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        """Three digits, and the interval."""
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Returns median(ours) / median(theirs) with a bootstrap interval over the pairs.

    Args:
      ours: a time for each pair, in order.
      theirs: the same of the other side.
    """
    pairs = np.array([ours, theirs])
    chosen = np.random.default_rng(0).integers(0, pairs.shape[1], (RESAMPLES, pairs.shape[1]))
    above, below = np.median(pairs[:, chosen], axis=2)
    low, high = np.percentile(above / below, [2.5, 97.5])
    return Ratio(statistics.median(ours) / statistics.median(theirs), float(low), float(high))
