"""Check on some examples that state which layers assign in training is a mean over rows, as averages over replicas require.

Replicas average floating state. Of a sum, such as a count of rows, that is another number than on one device; and integers
are not averaged at all. The state of a user's layer is compared for a few rows and for parts of them.
"""

import itertools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.distribution.strategy import Strategy
from tfdist.step.partial_batches import PartialResults, computed_for
from tfdist.step.side_effects import fed_back
from tfdist.step.tolerance import Tolerance, norm


def coupled_state(strategy: Strategy, model: keras.Model, x: Any, rows: int) -> list[str]:
    """Returns the paths of state that replicas cannot average, as far as some rows show it.

    That is an integer that depends on the rows; a sum over them; and what is no mean, if later steps compute with it.
    A variance, such as one of BatchNormalization, only describes a replica's own rows.

    Args:
      strategy: strategy of the model.
      model: built model.
      x: structure of tensors [rows, ...].
      rows: number of rows.
    """
    variables = keras_internals.own_state(model)
    if not variables:
        return []
    used: set[int] = set()

    def forward(first_row: tf.Tensor, own_rows: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        before, operations = [tf.identity(variable) for variable in variables], keras_internals.count_operations()
        with using(OneReplica()), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            outputs = model(own_rows, training=True)
        used.update(map(id, fed_back(variables, (outputs, model.losses), operations)))
        return before, [tf.identity(variable) for variable in variables]

    with keras_internals.normalizing_by_moving_statistics(keras_internals.layers_of(model)):
        compute = computed_for(forward, x, strategy)
        found = PartialResults.of(lambda part: _changes(part, *compute(x, part)), rows)
    relative = Tolerance.of(model).relative
    return [
        variable.path
        for number, variable in enumerate(variables)
        if _is_coupled(found.each(operator.itemgetter(number)), relative, is_used=id(variable) in used)
    ]


class _Change(NamedTuple):
    """What some rows have changed.

    Attributes:
      rows: number of rows.
      change: the change, in float64.
      rounding: bound on the norm of rounding errors; None for an integer.
    """

    rows: int
    change: np.ndarray
    rounding: float | None


def _changes(part: slice, before: list[np.ndarray], after: list[np.ndarray]) -> list[_Change]:
    """Returns how variables were changed."""
    found = []
    for old, new in zip(before, after, strict=True):
        dtype = tf.as_dtype(old.dtype)
        old, new = old.astype(np.float64), new.astype(np.float64)
        rounding = 4 * float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps) * norm(new) if dtype.is_floating else None
        found.append(_Change(part.stop - part.start, new - old, rounding))
    return found


def _is_coupled(found: PartialResults, relative: float, *, is_used: bool) -> bool:
    """Returns whether replicas cannot average a variable.

    Args:
      found: a `_Change` for each part.
      relative: relative tolerance of norms.
      is_used: whether later steps compute with the variable.
    """
    _, whole, rounding = found.full
    if not np.array_equal(whole, found.again.change) or not np.all(np.isfinite(whole)):
        return False
    every_part = list(itertools.chain(*found.partitions))
    tolerance = relative * max(norm(part.change) for part in every_part) + (rounding or 0.0)

    def match_whole(changes: Iterable[np.ndarray]) -> bool:
        return all(norm(change - whole) <= tolerance for change in changes)

    if match_whole(part.change for part in every_part):
        return False
    sums = (sum(part.change for part in parts) for parts in found.partitions)
    if rounding is None or match_whole(sums):
        return True
    weighted = (sum(part.rows * part.change for part in parts) for parts in found.partitions)
    return is_used and not match_whole(total / found.full.rows for total in weighted)
