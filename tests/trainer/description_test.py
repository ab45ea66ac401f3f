"""What `fit` shows of a whole run is in fit_as_keras_test.py."""

import types

import keras
import numpy as np
import pytest

from tfdist.data import ArraySource, DatasetSplits
from tfdist.data.row_partition import EVEN, RowAllocation
from tfdist.reporting import RunPlan
from tfdist.trainer import fit_loop


def test_a_model_with_frozen_weights():
    layers = [keras.layers.Input((4,)), keras.layers.Dense(300), keras.layers.BatchNormalization()]
    assert fit_loop.describe_model(keras.Sequential(layers, name="mine")) == (
        "mine, 2,700 parameters (10.5 KiB), 2,100 of them trainable"
    )


def test_data_with_a_name_several_inputs_and_nothing_to_evaluate():
    x = {name: np.zeros([1500, 2], "float32") for name in "ab"}
    source = ArraySource((x, np.zeros(1500, "int64")))
    assert fit_loop.describe_data(DatasetSplits("mine", source, None, (), 7)) == (
        "mine, 1,500 examples of 2, 2, 7 classes; nothing to evaluate"
    )
    assert fit_loop.describe_data(DatasetSplits("data", source, source, (), None)) == (
        "1,500 examples of 2, 2; 1,500 to evaluate"
    )


@pytest.mark.parametrize(
    ("replicas", "micro_steps", "text"),  # the rows of each replica, or their number for an even allocation
    [
        (1, 1, "64 examples"),
        (2, 1, "64 examples = 2 replicas x 32"),
        (2, 4, "64 examples = 2 replicas x 4 micro-steps x 8"),
        (1, 4, "64 examples = 4 micro-steps x 16"),
        (3, 1, "64 examples, divided over 3 replicas"),
        (3, 2, "64 examples, divided over 3 replicas and 2 micro-steps"),
        ((48, 16), 1, "64 examples = 48 + 16"),
        ((48, 16), 2, "64 examples = 48 + 16, in 2 micro-steps"),
        ((32, 32), 1, "64 examples = 2 replicas x 32"),
        ((4,) * 15 + (1,), 1, "61 examples = 1 to 4 for each replica"),
    ],
)
def test_the_division_of_a_batch(replicas, micro_steps, text):
    counts = replicas if isinstance(replicas, tuple) else ()
    size, allocation = len(counts) or replicas, RowAllocation(counts) if counts else EVEN
    strategy = types.SimpleNamespace(batch_parts=size, replicas=size, micro_batches=0, remote=None)
    settings = types.SimpleNamespace(micro_steps=micro_steps)
    found = fit_loop._describe_batch(strategy, settings, sum(counts) or 64, "float32", allocation)
    assert found == f"{text}, computed in float32"


@pytest.mark.parametrize(
    ("steps", "first", "text"),
    [
        (450, 0, "450 steps, 20 epochs"),
        (23, 0, "23 steps, 1 epoch"),
        (120, 0, "120 steps, 5.34 epochs"),
        (450, 120, "450 steps, 20 epochs; 120 steps completed before"),
    ],
)
def test_the_length_of_a_run(steps, first, text):
    plan = RunPlan(total_steps=steps, batch_size=64, examples_per_epoch=1437, first_step=first)
    assert fit_loop._describe_length(plan) == text
