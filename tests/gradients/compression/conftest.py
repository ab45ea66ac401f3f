"""Checks of the reducer contract, on four replicas over several steps."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.gradients.compression.reducers import edge_gradients, named
from tests.gradients.replicas import Runner, Step, bits, check_conservation, check_sums
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import ErrorFeedback


@pytest.fixture
def check_contract(mirrored4: Strategy) -> Callable[[str], list[Step]]:
    """Returns a function that checks the contract of a method over five steps, and returns the steps."""

    def check(text: str) -> list[Step]:
        gradients, reducer = edge_gradients(5, 4), named(text)
        run = Runner(mirrored4, reducer, gradients[0])
        steps = run.steps(gradients)
        for tensors, step in zip(gradients, steps, strict=True):
            check_sums(tensors, step)
            assert all(np.isfinite(w).all() for w in step.witnesses[0])
        again = run(gradients[0], run.initial())
        assert bits(again[:4]) == bits(steps[0][:4]), "the same step, the same numbers"
        if isinstance(reducer, ErrorFeedback):
            check_conservation(gradients, steps)
        for bad in (np.nan, np.inf, -np.inf):
            check_witnesses(run, gradients[0], bad)
        return steps

    return check


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
