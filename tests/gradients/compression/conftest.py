"""Checks of the reducer contract, on four replicas over several steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import Recording
from tfdist.distribution.strategy import HasCollectives
from tfdist.gradients import ErrorFeedback, Reducer
from tfdist.gradients.compression import create
from tfdist.grammar.rules import parse_rules

SHAPES = [(), (0, 3), (40, 50), (2, 3, 4, 5), (9, 11), (31,)]
DTYPES = ["float32", "float32", "float32", "float64", "float16", "float32"]


class Step(NamedTuple):
    """The result of a step: the fields of `Reduced` for each replica, as lists of arrays; and one replica's payload bytes."""

    totals: list[list[np.ndarray]]
    sent: list[list[np.ndarray]]
    state: list[list[np.ndarray]]
    witnesses: list[list[np.ndarray]]
    payload_bytes: float


def named(text: str) -> Reducer:
    """Returns the reducer of one method, with error feedback if it has any, without buckets."""
    [rule] = parse_rules(text)
    return create(rule.methods)


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
        gradients = edge_gradients(5)
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


def edge_gradients(steps: int) -> list[list[np.ndarray]]:
    """Returns gradients of four replicas: scalar, empty, 4-D, three dtypes; the last one has only zeros or denormals."""
    random = np.random.default_rng(0)
    made = []
    for step in range(steps):
        values = [random.standard_normal((4, *s)).astype(d) for s, d in zip(SHAPES, DTYPES, strict=True)]
        made.append([*values[:-1], values[-1] * np.float32(1e-39 * (step % 2))])
    return made


def check_sums(step: Step) -> None:
    for i, total in enumerate(step.totals[0]):
        assert (total.shape, total.dtype) == (SHAPES[i], DTYPES[i])
        assert all(bits(totals[i]) == bits(total) for totals in step.totals), "bitwise equal on all replicas"
        summed = sum(sent[i].astype("float64") for sent in step.sent)
        rounding = 2e-2 if DTYPES[i] == "float16" else 1e-5
        np.testing.assert_allclose(summed, total, rtol=rounding, atol=rounding)
    assert all(bits(w) == bits(step.witnesses[0]) for w in step.witnesses)


def check_conservation(gradients: list[list[np.ndarray]], steps: list[Step], kept: list[np.ndarray]) -> None:
    """Asserts that what a replica has sent and what it keeps add up to its gradients."""
    for i, left in enumerate(kept):
        given = sum(step[i].astype("float64") for step in gradients)
        sent = sum(np.stack([mine[i] for mine in step.sent]).astype("float64") for step in steps)
        rounding = 2e-2 if DTYPES[i] == "float16" else 1e-5
        np.testing.assert_allclose(sent + left, given, rtol=rounding, atol=rounding)


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
