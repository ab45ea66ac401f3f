"""Tolerances for the comparison of results from replicas' own rows with results from all rows."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from tfdist import keras_internals

# By compute dtype: relative tolerance of norms, and the fraction of the largest norm below which norms may be rounding
# error.
_BY_DTYPE = {"float64": (1e-7, 1e-4), "float32": (2e-3, 1e-2), "float16": (0.05, 0.1), "bfloat16": (0.1, 0.1)}


class Tolerance(NamedTuple):
    """Tolerance for differences of norms.

    Attributes:
      relative: relative to a norm.
      rounding: fraction of the largest norm below which norms are not compared relatively.
    """

    relative: float
    rounding: float

    @classmethod
    def of(cls, model: keras.Model) -> "Tolerance":
        """Returns the tolerance for the least precise of a model's layers."""
        computed = {layer.compute_dtype for layer in keras_internals.layers_of(model)} | {keras.config.floatx()}
        return cls(*max(_BY_DTYPE[dtype] for dtype in computed if dtype in _BY_DTYPE))

    @classmethod
    def of_sums(cls, model: keras.Model, values: Sequence[np.ndarray]) -> "Tolerance":
        """Returns the tolerance for sums that are computed from values; see `of` for those of low precision."""
        precise = all(value.dtype in (np.float32, np.float64) or value.dtype.kind in "iu" for value in values)
        return cls(relative=1e-3, rounding=0.0) if precise else cls.of(model)

    def holds(self, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> bool:
        """Returns whether arrays are pairwise equal up to the tolerance; non-finite elements must be so in both."""
        least = self.rounding * max((norm(value) for value in theirs), default=0.0) + 1e-12
        return all(
            np.array_equal(np.isfinite(a), np.isfinite(b))
            and norm(np.where(np.isfinite(a), a - b, 0.0)) <= self.relative * max(norm(b), least)
            for a, b in zip(ours, theirs, strict=True)
        )


def norm(value: np.ndarray) -> float:
    """Returns the Euclidean norm of the finite elements of an array."""
    return float(np.linalg.norm(np.where(np.isfinite(value), value, 0.0)))
