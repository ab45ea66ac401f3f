"""What is said of Keras's losses, metrics, and layers with their gradients, against numbers; and what is known of them."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.row_semantics import oracle


def spec(*shape: int | None, dtype: tf.DType = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec((None, *shape), dtype)


NUMBERS, CLASSES, TABLE = spec(5), spec(dtype=tf.int32), spec(3, dtype=tf.int32)
ARGUMENTS = dict.fromkeys(
    """SparseCategoricalCrossentropy Circle CategoricalGeneralizedCrossEntropy SparseCategoricalAccuracy
    SparseTopKCategoricalAccuracy""".split(),
    (CLASSES, NUMBERS),
) | dict.fromkeys(["MeanIoU", "IoU", "BinaryIoU"], (TABLE, TABLE))
ARGUMENTS |= {"CTC": (spec(4, dtype=tf.int32), spec(9, 5)), "Mean": (spec(), None), "Sum": (spec(), None)}
# Keras's classes that need arguments.
CLASS_ARGUMENTS = {
    "IoU": {"num_classes": 5, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": 5},
    "OneHotIoU": {"num_classes": 5, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": 5},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 3},
}
# Losses and metrics that depend on rows in another way, and why.
ALL_ROWS = {
    "Circle": "compares rows",
    "CTC": "has functions of another kind",
    "Dice": "ratio of sums",
    "Tversky": "ratio of sums",
    "Hinge": "asks whether all labels are 0 or 1",
    "SquaredHinge": "asks whether all labels are 0 or 1",
}


def classes_of(module: object, base: type) -> list[type]:
    """The classes that a module of Keras exports and that can be called with labels and predictions."""
    named = inspect.getmembers(module, inspect.isclass)
    abstract = {"Loss", "Metric", "LossFunctionWrapper", "MeanMetricWrapper", "ConcordanceCorrelation"}
    return [each for name, each in named if issubclass(each, base) and name not in abstract and name[0].isupper()]


def contradictions(traced: oracle.Traced) -> list[str]:
    data = [oracle.draw(traced.specs, 7, kind, 1) for kind in ("ties", "rare", "positive")]
    return [found for arguments in data for found in traced.contradictions(arguments, (1, 2, 4))]


@pytest.mark.parametrize("loss", classes_of(keras.losses, keras.losses.Loss), ids=lambda loss: loss.__name__)
def test_losses_are_as_labelled(loss: type):
    instance = loss()
    traced = oracle.Traced(lambda *arguments: instance(*arguments), *ARGUMENTS.get(loss.__name__, (NUMBERS, NUMBERS)))
    assert str(traced.results[0].label) == ("all rows" if loss.__name__ in ALL_ROWS else "mean")
    assert not contradictions(traced)


@pytest.mark.parametrize("metric", classes_of(keras.metrics, keras.metrics.Metric), ids=lambda metric: metric.__name__)
def test_metrics_are_as_labelled(metric: type):
    instance = metric(**CLASS_ARGUMENTS.get(metric.__name__, {}))
    specs = [each for each in ARGUMENTS.get(metric.__name__, (NUMBERS, NUMBERS)) if each is not None]
    instance.update_state(*[np.ones((2, *each.shape[1:]), each.dtype.as_numpy_dtype) for each in specs])

    def update(*arguments: tf.Tensor) -> tf.Tensor:
        instance.update_state(*arguments)
        return tf.zeros([])

    traced = oracle.Traced(update, *specs)
    labels = {str(value.label) for value in traced.assigned if value is not None}
    assert labels == ({"all rows"} if metric.__name__ in ALL_ROWS else {"replicated + sum"})
    assert not contradictions(traced)
