"""Functions of targets and outputs, and metrics, as users write them."""

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


def gathered_root(y_true: Any, y_pred: Any) -> Any:
    return root(tfdist.gather_rows(y_true), tfdist.gather_rows(y_pred))


class OneVariable(keras.Metric):
    """A metric with one variable."""

    def __init__(self) -> None:
        super().__init__(name=type(self).__name__.lower())
        self.value = self.add_variable((), "zeros", name="value")

    def result(self) -> Any:
        return self.value + 0.0  # Keras's logs would have the variable itself


class Peak(OneVariable):
    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y - outputs))))


class Moving(OneVariable):
    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign(0.9 * self.value + 0.1 * total(y, outputs))


class Count(OneVariable):
    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        counted = ops.cast(y > outputs, "float32")
        self.value.assign_add(ops.sum(counted if sample_weight is None else counted * sample_weight[:, None]))


class Heaviest(OneVariable):
    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(0.0 if sample_weight is None else ops.max(sample_weight))


class OfBatches(keras.Metric):
    """The mean over batches of a mean over rows."""

    def __init__(self) -> None:
        super().__init__(name="ofbatches")
        self.total, self.count = (self.add_variable((), "zeros", name=name) for name in ("total", "count"))

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(mean(y, outputs))
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.count
