"""Reducers over several steps: on the replicas of a strategy and on threads, and what must hold for their results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tests.collectives import threads
from tfdist.collectives import Collectives, RecordingCollectives
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import Reducer, ReductionResult


class Step(NamedTuple):
    """Fields of `ReductionResult` after a step, of each replica as lists of arrays, and the payload bytes of one replica."""

    totals: list[list[np.ndarray]]
    sent: list[list[np.ndarray]]
    state: list[list[np.ndarray]]
    witnesses: list[list[np.ndarray]]
    payload_bytes: float


def initial(reducer: Reducer, tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the state of one replica before the first step."""
    specs = [tf.TensorSpec(x.shape, x.dtype, f"variable{i}") for i, x in enumerate(tensors)]
    return [tf.broadcast_to(tf.cast(s.initial, s.dtype), s.shape) for s in reducer.state(specs)]


class Runner:
    """Calls a reducer on each replica, with its own tensors and state, in one trace."""

    def __init__(self, strategy: Strategy, reducer: Reducer, tensors: Sequence[np.ndarray]):
        """Takes tensors like those of a step, each [replicas, ...]."""
        self._strategy, self._reducer, self._tensors = strategy, reducer, tensors
        self._recording = RecordingCollectives(strategy.collectives)
        self._step = tf.function(self._traced, autograph=False)

    def initial(self) -> list[np.ndarray]:
        """Returns the state before the first step, each [replicas, ...]."""
        own = initial(self._reducer, [x[0] for x in self._tensors])
        return [np.stack([value] * self._strategy.replicas) for value in own]

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


def on_threads(
    reducer: Reducer, gradients: Sequence[Sequence[np.ndarray]], **how: Any
) -> tuple[list[Step], list[RecordingCollectives]]:
    """Returns the steps with lists of tensors [replicas, ...], and the calls of each replica; how: see `threads.run`."""

    def replica(collectives: Collectives) -> tuple[list[ReductionResult], RecordingCollectives]:
        recording, made = RecordingCollectives(collectives), []
        state = initial(reducer, [x[0] for x in gradients[0]])
        for number, tensors in enumerate(gradients):
            mine = [tf.constant(x[collectives.rank]) for x in tensors]
            made.append(reducer.reduce(mine, state, recording, name=f"step{number}"))
            state = made[-1].state
        return made, recording

    everyone, recordings = zip(*threads.run(len(gradients[0][0]), replica, **how), strict=True)
    payload = recordings[0].payload_bytes / len(gradients)
    steps = [
        [[[np.asarray(x) for x in part] for part in reduced] for reduced in step]
        for step in zip(*everyone, strict=True)
    ]
    return [Step(*map(list, zip(*step, strict=True)), payload) for step in steps], list(recordings)


def check_sums(tensors: Sequence[np.ndarray], step: Step) -> None:
    """Asserts that all replicas have the same totals and witnesses, and totals that are the sums of what was sent."""
    for i, (tensor, total) in enumerate(zip(tensors, step.totals[0], strict=True)):
        assert (total.shape, total.dtype) == (tensor.shape[1:], tensor.dtype)
        assert all(bits(totals[i]) == bits(total) for totals in step.totals), "bitwise equal on all replicas"
        assert_near(sum(sent[i].astype("float64") for sent in step.sent), total, tensor.dtype)
    assert all(bits(w) == bits(step.witnesses[0]) for w in step.witnesses)


def check_conservation(gradients: Sequence[Sequence[np.ndarray]], steps: Sequence[Step]) -> None:
    """Asserts that what a replica has sent and what it keeps, its first state, add up to its gradients."""
    for i, tensor in enumerate(gradients[0]):
        given = sum(step[i].astype("float64") for step in gradients)
        sent = sum(np.stack([mine[i] for mine in step.sent]).astype("float64") for step in steps)
        assert_near(sent + np.stack([state[i] for state in steps[-1].state]), given, tensor.dtype)


def assert_near(found: Any, wanted: Any, dtype: Any) -> None:
    rounding = 2e-2 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(found, wanted, rtol=rounding, atol=rounding)


def bits(arrays: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in tf.nest.flatten(arrays)]
