"""Unchanged programs, with random layers and local statistics: over several seeds, losses have the distribution of one device.

The last loss of each `fit` is compared by Welch's t statistic. Differences below one hundredth of the loss do not count: local
batch normalization computes statistics over fewer rows, so that its distribution is not quite the same.

Three seeds are enough if the losses clearly agree; otherwise, two more are run.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.programs import running
from tests.programs.catalog import HERE, Program

SEEDS, FIRST = 5, 3
_MOST_ERRORS = 5.0  # standard errors: with 2 x 5 runs, one in a thousand comparisons exceeds this by chance
_CLEAR = 2.0  # standard errors up to which the first seeds are enough
_NOTHING = 0.01
# Layers whose output or statistics depend on chance or on the replica's rows, and random numbers that a program draws.
_RANDOM = re.compile(
    r"Dropout|dropout=|Random(Flip|Rotation|Zoom|Contrast|Brightness|Translation|Crop)|Gaussian|BatchNormalization"
    r"|(keras|tf|layers|ops)\.random\.(?!set_seed)|SeedGenerator"
)


def applies(program: Program) -> bool:
    """Returns whether a program trains on the strategies that `tfdist run` chooses, with randomness that `--quiet` removes.

    Without, its numbers equal those of one device also as it is written.
    """
    return not (program.own_strategy or program.refused) and bool(_RANDOM.search(_text(program)))


def compares(program: Program) -> bool:
    """Returns whether a program has losses that are compared: those of `fit`. Others need only run to their end."""
    return ".fit(" in _text(program)


def _text(program: Program) -> str:
    return (HERE / program.path).read_text(encoding="utf-8")


def verdicts(program: Program, strategies: Sequence[str]) -> dict[str, str]:
    """Returns "distribution" for each strategy, and the largest difference in standard errors, or what is wrong."""
    plain = functools.cache(functools.partial(_losses, program, "plain"))  # by seed
    return {strategy: _verdict(program, strategy, plain) for strategy in strategies}


class _Failed(Exception):
    """A program has failed."""


def _verdict(program: Program, strategy: str, plain: Callable[[int], list[float]]) -> str:
    ours: list[list[float]] = []
    try:
        for seeds in (FIRST, SEEDS):
            expected = [plain(seed) for seed in range(seeds)]
            ours += [_losses(program, strategy, seed) for seed in range(len(ours), seeds)]
            worst = max(map(_standard_errors, np.transpose(ours), np.transpose(expected)), default=0.0)
            if worst <= _CLEAR:
                break
    except _Failed as failure:
        return str(failure)
    return f"{'distribution' if worst <= _MOST_ERRORS else 'differs'}: {worst:.1f} standard errors"


def _losses(program: Program, strategy: str, seed: int) -> list[float]:
    """Returns the last loss of each `fit` in a run."""
    outcome = running.start(program.path, strategy, precision="float32", quiet=(), seed=seed)
    if outcome.code or not outcome.ranks:
        last = running.last_line(outcome.output)
        raise _Failed(f"fails on {strategy} with seed {seed} and code {outcome.code}: {last}")
    return _last_losses(outcome.ranks[0]["results"])


def _last_losses(results: Sequence[dict[str, Any]]) -> list[float]:
    histories = [found["fit"] for found in results if "fit" in found]
    return [float(np.mean(value[-1])) for history in histories for name, value in history.items() if "loss" in name]


def _standard_errors(ours: np.ndarray, theirs: np.ndarray) -> float:
    apart = abs(float(np.mean(ours) - np.mean(theirs))) - _NOTHING * abs(float(np.mean(theirs)))
    error = math.sqrt((np.var(ours, ddof=1) + np.var(theirs, ddof=1)) / len(ours))
    return max(apart, 0.0) / (error + 1e-12)
