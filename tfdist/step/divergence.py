"""Notices a training loss that diverges while it is still finite."""

from collections.abc import Iterable, Mapping
from typing import Any

FACTOR = 5.0  # times the initial loss
STEPS = 10  # in succession
EXAMPLES = 32  # over which the initial loss is taken, so that single examples do not matter


class Divergence:
    """Compares the loss with the initial one.

    The initial loss is the mean over the first steps that have 32 examples together: one step, unless batches are
    smaller. A loss diverges if each of 10 steps in succession has a loss of more than 5 times that. Cross-entropy begins
    near ln(classes), and no useful model stays at a multiple of it; single batches with a large loss, a warm restart or
    a noisy start do not count. Losses that begin at 0 or below are not judged.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        """Begins with the first step of a run, or with what `to_json` returned."""
        saved = saved or {"initial": 0.0, "steps": 0, "above": 0, "is_over": False}
        self._initial, self._steps = float(saved["initial"]), int(saved["steps"])
        self._above, self._is_over = int(saved["above"]), bool(saved["is_over"])

    def add(self, losses: Iterable[float], batch_size: int) -> float | None:
        """Adds finite losses of steps; returns the initial loss if they diverge, once per run.

        Args:
          losses: loss of each step.
          batch_size: examples per step.
        """
        if self._is_over:
            return None
        for loss in losses:
            if self._steps * batch_size < EXAMPLES:
                self._initial = (self._initial * self._steps + float(loss)) / (self._steps + 1)
                self._steps += 1
            else:
                self._above = self._above + 1 if loss > FACTOR * self._initial else 0
                self._is_over |= self._initial <= 0 or self._above >= STEPS
        return self._initial if self._is_over and self._initial > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON, for a checkpoint."""
        return {"initial": self._initial, "steps": self._steps, "above": self._above, "is_over": self._is_over}


def describe(step: int, loss: float, initial: float) -> str:
    """Returns the warning about a loss that diverges, found after step `step`."""
    return (
        f"The training loss diverges: it has been more than {FACTOR:g} times the initial {initial:.4g} for {STEPS} steps, "
        f"and is {loss:.4g} at step {step}. Lower the learning rate, or add a warmup or gradient clipping."
    )
