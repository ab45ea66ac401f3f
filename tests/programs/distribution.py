"""Unchanged programs, with random layers and local statistics: over several seeds, losses have the distribution of one device.

The last loss of each `fit` is compared by Welch's t statistic. Differences below one hundredth of the loss do not count: local
batch normalization computes statistics over fewer rows, so that its distribution is not quite the same.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.programs import running
from tests.programs.catalog import Program

SEEDS = 5
_MOST_ERRORS = 5.0  # standard errors: with 2 x 5 runs, one in a thousand comparisons exceeds this by chance
_NOTHING = 0.01


def applies(program: Program) -> bool:
    """Returns whether a program trains on the strategies that `tfdist.run` chooses."""
    return not (program.own_strategy or program.refused)


def verdicts(program: Program, strategies: Sequence[str], seeds: int = SEEDS) -> dict[str, str]:
    """Returns "distribution" for each strategy, and the largest difference in standard errors, or what is wrong."""
    try:
        plain = _losses(program, "plain", seeds)
    except _Failed as failure:
        return dict.fromkeys(strategies, str(failure))
    return {strategy: _verdict(program, strategy, plain) for strategy in strategies}


class _Failed(Exception):
    """A program has failed."""


def _verdict(program: Program, strategy: str, plain: np.ndarray) -> str:
    try:
        ours = _losses(program, strategy, len(plain))
    except _Failed as failure:
        return str(failure)
    worst = max((_standard_errors(*pair) for pair in zip(ours.T, plain.T, strict=True)), default=0.0)
    return f"{'distribution' if worst <= _MOST_ERRORS else 'differs'}: {worst:.1f} standard errors"


def _losses(program: Program, strategy: str, seeds: int) -> np.ndarray:
    """Returns [seeds, losses], the last loss of each `fit` in each run."""
    found = []
    for seed in range(seeds):
        outcome = running.start(program.path, strategy, precision="float32", quiet=(), seed=seed)
        if outcome.code or not outcome.ranks:
            last = running.last_line(outcome.output)
            raise _Failed(f"fails on {strategy} with seed {seed} and code {outcome.code}: {last}")
        found.append(_last_losses(outcome.ranks[0]["results"]))
    return np.array(found)


def _last_losses(results: Sequence[dict[str, Any]]) -> list[float]:
    histories = [found["fit"] for found in results if "fit" in found]
    return [float(np.mean(value[-1])) for history in histories for name, value in history.items() if "loss" in name]


def _standard_errors(ours: np.ndarray, theirs: np.ndarray) -> float:
    apart = abs(float(np.mean(ours) - np.mean(theirs))) - _NOTHING * abs(float(np.mean(theirs)))
    error = math.sqrt((np.var(ours, ddof=1) + np.var(theirs, ddof=1)) / len(ours))
    return max(apart, 0.0) / (error + 1e-12)
