"""Makes the updates of parameter servers again, in one process: each gradient from the weights that it was computed from."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import Sum
from tfdist.parameter_server.servers import BY_ROWS
from tfdist.parameter_server.update_order import Update
from tfdist.step.compiled_loop import Loop, LoopResult, MakeLoop, compile_loop, split_numbers
from tfdist.step.compiled_steps import Steps
from tfdist.step.gradient_source import GradientSource
from tfdist.step.metrics import ModelMetrics
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.synchronization import WeightSynchronizer


class Replay(WeightSynchronizer):
    """Steps of one device in the order of recorded updates: delayed gradients."""

    def __init__(self, model: keras.Model, strategy: Strategy, updates: Sequence[Update], placement: Sequence[int]):
        """Initializes the replay.

        Args:
          model: the model, with the weights before the first update.
          strategy: strategy of one device.
          updates: all updates of the recorded run, in their order.
          placement: see `Servers.placement`.
        """
        self._model, self._strategy, self._updates, self._placement = model, strategy, updates, placement

    def loop(self, steps: Steps, batch_size: int | None, rate: float, step: int, make: MakeLoop = compile_loop) -> Loop:
        """See base class."""

        def create(settings: Settings, store: StateStore, metrics: ModelMetrics) -> tuple[Step, Loop]:
            settings = dataclasses.replace(settings, batch_size=batch_size)
            replayed = Step(GradientSource(self._model, self._strategy, store, settings, metrics), Sum(), store)
            return replayed, ReplayLoop(replayed, self._strategy, self._updates, self._placement)

        return steps.custom_loop("replay", create)


class ReplayLoop:
    """A call of the loop; see `Loop`. It keeps the weights after each of its updates."""

    def __init__(self, step: Step, strategy: Strategy, updates: Sequence[Update], placement: Sequence[int]):
        """Initializes the loop; see `Replay`."""
        self._step, self._strategy, self._updates, self._placement = step, strategy, updates, placement
        self._states = keras_internals.moving_statistics(step.source.model)
        self._variables = [*map(keras_internals.value_of, (*step.variables, *self._states))]
        self._compute = tf.function(lambda *args: strategy.run(step.compute, *args), autograph=False)
        self._apply = tf.function(self._apply_used, autograph=False)

    def __call__(
        self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor
    ) -> LoopResult:
        """Makes the updates of these steps again."""
        first, count = int(first_step), int(steps)
        batches = [split_numbers(next(iterator), self._strategy)[0] for _ in range(count)]
        versions = {first: self._values()}
        losses = np.zeros([count])
        for update in self._updates[first : first + count]:
            read = [self._read(versions, update.versions, i) for i in range(len(self._placement))]
            self._assign(read)
            computed = self._compute(batches[update.ticket - first], tf.constant(update.ticket, tf.int64), with_norm)
            assigned, current = self._values(), versions[update.version]
            self._assign([*current[: len(self._step.variables)], *self._new_states(update, read, assigned, current)])
            self._apply(computed)
            versions[update.version + 1] = self._values()
            losses[update.ticket - first] = float(computed.loss)
        return LoopResult(
            losses=tf.constant(losses, keras.config.floatx()),
            counted=tf.ones([count], tf.bool),
            norm=tf.zeros([], keras.config.floatx()),
            may_continue=tf.constant(True),
            gradient_finite=(),
            waited=tf.zeros([], tf.float64),
            busy=tf.zeros([1], tf.float64),
            numbers=tf.zeros([0], tf.int64),
            sizes=tf.zeros([count], tf.int32),
        )

    def _apply_used(self, computed: Any) -> None:
        self._strategy.run(lambda value: self._step.apply(value, self._step.unused()), computed)

    def _values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self._variables]

    def _assign(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def _read(self, versions: Mapping[int, Sequence[np.ndarray]], of_servers: Sequence[int], i: int) -> np.ndarray:
        """Returns variable i as a worker has read it, given the version that it has read from each server."""
        server = self._placement[i]
        if server != BY_ROWS:
            return versions[of_servers[server]][i]
        table = np.empty_like(versions[of_servers[0]][i])
        for first, version in enumerate(of_servers):
            table[first :: len(of_servers)] = versions[version][i][first :: len(of_servers)]
        return table

    def _new_states(
        self,
        update: Update,
        read: Sequence[np.ndarray],
        assigned: Sequence[np.ndarray],
        current: Sequence[np.ndarray],
    ) -> Iterator[np.ndarray]:
        """Yields the values of states after an update; see `VariableServer`."""
        for i in range(len(self._step.variables), len(self._variables)):
            is_current = update.versions[self._placement[i]] == update.version
            yield assigned[i] if is_current else current[i] + (assigned[i] - read[i])
