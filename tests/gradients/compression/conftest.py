"""Checks of the reducer contract, on four replicas over several steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.compression.reducers import DTYPES, SHAPES, assert_near, edge_gradients, named
from tfdist.collectives import Recording
from tfdist.distribution.strategy import HasCollectives
from tfdist.gradients import ErrorFeedback, Reducer


class Step(NamedTuple):
    """The result of a step: the fields of `Reduced` for each replica, as lists of arrays; and one replica's payload bytes."""

    totals: list[list[np.ndarray]]
    sent: list[list[np.ndarray]]
    state: list[list[np.ndarray]]
    witnesses: list[list[np.ndarray]]
    payload_bytes: float


class Runner:
    """Calls a reducer on each replica, with its own tensors and state, in one trace."""

    def __init__(self, strategy: HasCollectives, reducer: Reducer, specs: Sequence[tf.TensorSpec]):
        self._strategy, self._reducer, self._specs = strategy, reducer, specs
        self._recording = Recording(strategy.collectives)
        self._step = tf.function(self._traced, autograph=False)

    def initial(self) -> list[np.ndarray]:
        """Returns the state before the first step, each [replicas, ...]."""
        replicas = self._strategy.replicas
        states = self._reducer.state(self._specs)
        return [np.full((replicas, *s.shape), s.initial, s.dtype.as_numpy_dtype) for s in states]

    def __call__(self, tensors: Sequence[np.ndarray], state: Sequence[np.ndarray]) -> Step:
        """Runs one step with tensors [replicas, ...]."""
        replicas = range(self._strategy.replicas)
        parts = self._step([tf.constant(x) for x in tensors], [tf.constant(x) for x in state])
        by_replica = [[[np.asarray(x[r]) for x in part] for r in replicas] for part in parts]
        return Step(*by_replica, self._recording.payload_bytes / len(replicas))

    def steps(self, gradients: Sequence[Sequence[np.ndarray]]) -> list[Step]:
        """Runs a step for each list of tensors, each with the state that the previous one returned."""
        state, made = self.initial(), []
        for tensors in gradients:
            made.append(self(tensors, state))
            state = [np.stack(each) for each in zip(*made[-1].state, strict=True)]
        return made

    def _traced(self, tensors: list[tf.Tensor], state: list[tf.Tensor]) -> Any:
        def replica_function() -> Any:
            rank = self._strategy.collectives.rank
            mine = [[tf.gather(stacked, rank) for stacked in part] for part in (tensors, state)]
            return self._reducer.reduce(*mine, self._recording, name="gradients")

        made = self._strategy.run(replica_function)
        return tf.nest.map_structure(lambda value: tuple(self._strategy.local(value)), made)


@pytest.fixture
def runner() -> Callable[..., Runner]:
    """Returns a function that creates the runner of a strategy and a reducer, for tensors like the given [replicas, ...]."""

    def make(strategy: HasCollectives, reducer: Reducer, tensors: Sequence[np.ndarray]) -> Runner:
        specs = [tf.TensorSpec(x.shape[1:], x.dtype, f"variable{i}") for i, x in enumerate(tensors)]
        return Runner(strategy, reducer, specs)

    return make


@pytest.fixture
def check_contract(mirrored4: HasCollectives, runner: Callable[..., Runner]) -> Callable[[str], list[Step]]:
    """Returns a function that checks the contract of a method over five steps, and returns the steps."""

    def check(text: str) -> list[Step]:
        random = np.random.default_rng(0)
        gradients = [edge_gradients(random, step, 4) for step in range(5)]
        reducer = named(text)
        run = runner(mirrored4, reducer, gradients[0])
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
