"""Checks of the reducer contract, on four replicas over several steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.compression.reducers import DTYPES, SHAPES, assert_near, edge_gradients, named
from tests.gradients.replicas import Runner, Step
from tfdist.distribution.strategy import HasCollectives
from tfdist.gradients import ErrorFeedback


@pytest.fixture
def check_contract(mirrored4: HasCollectives) -> Callable[[str], list[Step]]:
    """Returns a function that checks the contract of a method over five steps, and returns the steps."""

    def check(text: str) -> list[Step]:
        random = np.random.default_rng(0)
        gradients = [edge_gradients(random, step, 4) for step in range(5)]
        reducer = named(text)
        run = Runner(mirrored4, reducer, gradients[0])
        steps = run.steps(gradients)
        for step in steps:
            check_sums(step)
            assert all(np.isfinite(w).all() for w in step.witnesses[0])
        again = run(gradients[0], run.initial())
        assert bits(again[:4]) == bits(steps[0][:4]), "the same step, the same numbers"
        if isinstance(reducer, ErrorFeedback):
            errors = [np.stack([state[i] for state in steps[-1].state]) for i in range(len(SHAPES))]
            check_conservation(gradients, steps, errors)
        for bad in (np.nan, np.inf, -np.inf):
            check_witnesses(run, gradients[0], bad)
        return steps

    return check


def check_sums(step: Step) -> None:
    for i, total in enumerate(step.totals[0]):
        assert (total.shape, total.dtype) == (SHAPES[i], DTYPES[i])
        assert all(bits(totals[i]) == bits(total) for totals in step.totals), "bitwise equal on all replicas"
        summed = sum(sent[i].astype("float64") for sent in step.sent)
        assert_near(summed, total, i)
    assert all(bits(w) == bits(step.witnesses[0]) for w in step.witnesses)


def check_conservation(gradients: list[list[np.ndarray]], steps: list[Step], kept: list[np.ndarray]) -> None:
    """Asserts that what a replica has sent and what it keeps add up to its gradients."""
    for i, left in enumerate(kept):
        given = sum(step[i].astype("float64") for step in gradients)
        sent = sum(np.stack([mine[i] for mine in step.sent]).astype("float64") for step in steps)
        assert_near(sent + left, given, i)


def check_witnesses(run: Runner, gradients: list[np.ndarray], bad: float) -> None:
    """Asserts that a non-finite element on one replica is detected by all replicas, for every tensor."""
    for i, tensor in enumerate(gradients):
        if tensor.size:
            values = list(gradients)
            values[i] = tensor.copy()
            values[i].reshape(4, -1)[2, -1] = bad
            step = run(values, run.initial())
            assert all(bits(w) == bits(step.witnesses[0]) for w in step.witnesses)
            assert not all(np.isfinite(w).all() for w in step.witnesses[0])


def bits(arrays: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in tf.nest.flatten(arrays)]
