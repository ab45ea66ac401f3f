"""What is said of Keras's losses and metrics, against numbers; and what the page says that all of Keras's parts need."""

import runpy

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.repository.architecture_test import ROOT
from tests.row_semantics import oracle

KERAS = runpy.run_path(str(ROOT / "docs" / "generate" / "keras_parts.py"))
LOSSES, METRICS = (KERAS["classes"](kind) for kind in ("losses", "metrics"))
EXAMPLES = [line for line in KERAS["PAGE"].read_text("utf-8").splitlines() if line.startswith("| `tf.")]
TABLE = tf.TensorSpec((None, 3), tf.int32)


def specs(name: str) -> list[tf.TensorSpec]:
    if name in ("MeanIoU", "IoU", "BinaryIoU"):
        return [TABLE, TABLE]
    if name in ("Mean", "Sum"):
        return [tf.TensorSpec((None,), tf.float32)]
    return [tf.TensorSpec((None, *each.shape), each.dtype) for each in KERAS["specs"](name)]


def contradictions(traced: oracle.Traced) -> list[str]:
    data = [oracle.draw(traced.specs, 7, kind, 1) for kind in ("ties", "rare", "positive")]
    return [found for arguments in data for found in traced.contradictions(arguments, (1, 2, 4))]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_as_labelled(name: str):
    instance = KERAS["made"](name, LOSSES[name])
    assert not contradictions(oracle.Traced(lambda *arguments: instance(*arguments), *specs(name)))


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_as_labelled(name: str):
    instance, given = KERAS["made"](name, METRICS[name]), specs(name)
    instance.update_state(*[np.ones((2, *each.shape[1:]), each.dtype.as_numpy_dtype) for each in given])

    def update(*arguments: tf.Tensor) -> tf.Tensor:
        instance.update_state(*arguments)
        return tf.zeros([])

    assert not contradictions(oracle.Traced(update, *given))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Keras, about masks and lambdas
@pytest.mark.parametrize("kind", KERAS["KINDS"])
def test_the_page_says_what_each_part_needs(kind: str, single: tfdist.Strategy):
    shown = KERAS["PAGE"].read_text("utf-8").partition(KERAS["BEGIN"])[2].splitlines()
    counts, others = KERAS["lines"](kind, single)
    assert [line for line in shown if line.startswith(f"| {kind} |")] == [counts, *others]


@pytest.mark.parametrize("row", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_page(row: str, single: tfdist.Strategy):
    assert KERAS["of_example"](row.split("`")[1], single) == row
