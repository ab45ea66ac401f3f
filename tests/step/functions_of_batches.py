"""Functions of targets and outputs, as users write them for losses and metrics."""

from typing import Any

import keras

import tfdist

ops = keras.ops


def squares(y_true: Any, y_pred: Any) -> Any:
    return ops.square(y_true - y_pred)


def mean(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(squares(y_true, y_pred))


def per_row(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(squares(y_true, y_pred), axis=-1)


def total(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(squares(y_true, y_pred))


def root(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(mean(y_true, y_pred))


def where_positive(y_true: Any, y_pred: Any) -> Any:
    mask = ops.cast(y_true > 0, y_pred.dtype)
    return ops.sum(mask * squares(y_true, y_pred)) / ops.sum(mask)


def where_second_is_positive(y_true: Any, y_pred: Any) -> Any:
    """The mean over rows whose second label is positive; NaN without such rows."""
    mask = ops.cast(y_true[:, 1] > 0, y_pred.dtype)
    return ops.sum(mask * per_row(y_true, y_pred)) / ops.sum(mask)


def gathered_root(y_true: Any, y_pred: Any) -> Any:
    return root(tfdist.gather_rows(y_true), tfdist.gather_rows(y_pred))
