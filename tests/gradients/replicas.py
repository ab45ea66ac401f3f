"""Reducers on the replicas of a strategy, over several steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.collectives import Recording
from tfdist.distribution.strategy import HasCollectives
from tfdist.gradients import Reducer


class Step(NamedTuple):
    """The result of a step: the fields of `Reduced` for each replica, as lists of arrays; and one replica's payload bytes."""

    totals: list[list[np.ndarray]]
    sent: list[list[np.ndarray]]
    state: list[list[np.ndarray]]
    witnesses: list[list[np.ndarray]]
    payload_bytes: float


class Runner:
    """Calls a reducer on each replica, with its own tensors and state, in one trace."""

    def __init__(self, strategy: HasCollectives, reducer: Reducer, tensors: Sequence[np.ndarray]):
        """Takes tensors like those of a step, each [replicas, ...]."""
        self._strategy, self._reducer = strategy, reducer
        self._specs = [tf.TensorSpec(x.shape[1:], x.dtype, f"variable{i}") for i, x in enumerate(tensors)]
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
