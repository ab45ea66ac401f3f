"""Rules for inputs: one function for each suspicious kind of values, and a table."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tfdist.step.label_rules import Finding

_SOME_COLUMNS = 3  # as many as a message names
_BYTE = 255
_BRIGHT = 64  # scaled images have no pixel of this value


class Inputs(NamedTuple):
    """One array of inputs, or of sample weights.

    Attributes:
      name: how messages call it.
      values: [rows, ...], those of some examples.
      scales: whether the model may scale it: it has a layer or an operation for that, or its code is not known.
    """

    name: str
    values: np.ndarray
    scales: bool


def where_not_finite(inputs: Inputs) -> str:
    """Returns where NaN or inf is: "x", or "column 3 of x" if examples are rows of a table; "" if nowhere."""
    values = inputs.values
    if not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all():
        return ""
    if values.ndim != 2 or values.shape[1] == 1:
        return inputs.name
    columns = [str(column) for column in np.flatnonzero(~np.isfinite(values).all(axis=0))]
    if len(columns) > _SOME_COLUMNS:
        return f"{len(columns)} columns of {inputs.name}, such as {', '.join(columns[:_SOME_COLUMNS])}"
    if len(columns) == 1:
        return f"column {columns[0]} of {inputs.name}"
    return f"columns {', '.join(columns[:-1])} and {columns[-1]} of {inputs.name}"


def _not_finite(inputs: Inputs) -> Finding | None:
    place, values = where_not_finite(inputs), inputs.values
    if not place:
        return None
    rows = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).sum())
    kinds = [name for name, found in (("NaN", np.isnan(values)), ("inf", np.isinf(values))) if found.any()]
    return Finding(
        f"There is {' and '.join(kinds)} in {place}, in {rows} of the {len(values)} examples checked: the loss and "
        "the weights become NaN. Remove these examples, or replace the values, for example by the column's mean."
    )


def _not_scaled(inputs: Inputs) -> Finding | None:
    values = inputs.values
    is_image = values.ndim in (3, 4) and (values.dtype == np.uint8 or np.issubdtype(values.dtype, np.floating))
    if inputs.scales or not is_image or not np.isfinite(values).all():
        return None
    if values.min() < 0 or not _BRIGHT < values.max() <= _BYTE or (values != np.round(values)).any():
        return None
    return Finding(
        f"{inputs.name} has values of 0 to {values.max():g}, like bytes of images, and no layer of the model scales them: "
        "training is slow, or diverges. Divide by 255, or begin the model with keras.layers.Rescaling(1 / 255)."
    )


RULES: tuple[Callable[[Inputs], Finding | None], ...] = (_not_finite, _not_scaled)


def findings(inputs: Inputs) -> Iterator[Finding]:
    """Yields what the rules find."""
    yield from (found for rule in RULES if (found := rule(inputs)))
