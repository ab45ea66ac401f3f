"""Checks the arrays that a program passes to Keras's `fit`; other data is not read ahead, which could change it."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.reporting.warn_once import warn_once
from tfdist.step import data_check

_LOOK_AT_BYTES = 2**24
_LEAST_ROWS = 64


def arrays_of(given: Mapping[str, Any]) -> Any:
    """Returns rows of the arrays among the arguments of `fit`, (x, y) or (x, y, sample_weight); None without arrays."""
    parts = tuple(given.get(name) for name in ("x", "y", "sample_weight"))
    parts = parts[:2] if parts[2] is None else parts
    leaves = keras.tree.flatten(parts)
    sizes = {len(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else 0 for leaf in leaves}
    if len(sizes) != 1 or 0 in sizes:
        return None
    [size] = sizes
    affordable = size * _LOOK_AT_BYTES // max(_LOOK_AT_BYTES, sum(leaf.nbytes for leaf in leaves))
    count = min(size, max(affordable, _LEAST_ROWS))
    return keras.tree.map_structure(lambda leaf: leaf[np.arange(count) * size // count], parts)


def check_arrays(strategy: Strategy, model: keras.Model, arrays: Any) -> None:
    """Checks rows of arrays against the built model and its losses; logs what is suspicious on the chief.

    Args:
      strategy: strategy on which it runs.
      model: compiled and built model. One with a step of its own may use labels in any way, and is not checked.
      arrays: the result of `arrays_of`, the same on every process.

    Raises:
      InputError: labels with which training is certainly wrong.
    """
    if arrays is None or keras_internals.overridden(model, "train_step"):
        return
    found = data_check.findings(model, arrays)
    for finding in found:
        if finding.is_error:
            raise InputError(finding.text)
    for finding in found:
        if strategy.is_chief:
            warn_once(finding.text)
