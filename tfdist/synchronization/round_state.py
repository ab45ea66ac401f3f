"""What the replicas of a round keep: the global state from which clients start, and sums over their clients."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives, State
from tfdist.step.validation import inner_optimizer
from tfdist.synchronization.exchange import InitialState
from tfdist.synchronization.global_weights import GlobalWeights


class Counts(NamedTuple):
    """Scalars of a replica in a round, float64.

    Attributes:
      examples: sum of the numbers of examples of its clients.
      rows: rows on which they have trained.
      loss: sum over these rows of the loss.
      not_finite: number of batches whose loss or gradients were not finite; after the first, the replica stops.
    """

    examples: tf.Variable
    rows: tf.Variable
    loss: tf.Variable
    not_finite: tf.Variable


class RoundState:
    """Variables of one model's rounds; the methods are called in replica functions.

    Between rounds, all replicas have the global weights and an optimizer without state, so that none of this is saved.
    Memory on each replica: three variables per trainable variable, with that of `GlobalWeights`, and two per moving
    statistic.

    Attributes:
      weights: trainable variables of the model.
      global_weights: the global weights.
      changes: for each weight, the sum over a replica's clients of n_k (x - w_k).
      statistics: moving statistics of the model, such as those of BatchNormalization.
      statistics_sums: for each of them, the sum over a replica's clients of n_k times its value.
      counts: scalars.
    """

    def __init__(self, model: keras.Model, strategy: HasCollectives, outer: str):
        """Creates the variables.

        Args:
          model: compiled and built model.
          strategy: its strategy.
          outer: the outer optimizer; see `GlobalWeights`.
        """
        self._strategy = strategy
        self._optimizer = inner_optimizer(model.optimizer)
        self._slots = keras_internals.slots(self._optimizer)
        self._initial_slots = InitialState(self._optimizer)
        self.weights = list(model.trainable_variables)
        self.statistics = keras_internals.moving_statistics(model)
        self.global_weights = GlobalWeights(model.trainable_variables, strategy, outer)
        self.changes = strategy.allocate(_states("change", self.weights))
        self.statistics_sums = strategy.allocate(_states("sum", self.statistics))
        self._initial_statistics = strategy.allocate(_states("start", self.statistics))
        counts = [State(f"round/{name}", (), tf.float64, per_replica=True) for name in Counts._fields]
        self.counts = Counts(*strategy.allocate(counts))

    def begin_round(self) -> None:
        """Resets the sums; all replicas have the global weights and statistics."""
        for total in (*self.changes, *self.statistics_sums, *self.counts):
            total.assign(tf.zeros(total.shape, total.dtype))
        for initial, statistic in zip(self._initial_statistics, self.statistics, strict=True):
            initial.assign(statistic.value)

    def begin_client(self) -> None:
        """Assigns the global weights and statistics, and resets the optimizer."""
        self._assign_weights(self.global_weights.values(), 0)
        for statistic, initial in zip(self.statistics, self._initial_statistics, strict=True):
            statistic.assign(tf.convert_to_tensor(initial))

    def end_client(self, examples: tf.Tensor) -> None:
        """Adds what a client with this number of examples has learned."""
        for total, x, w in zip(self.changes, self.global_weights.values(), self.weights, strict=True):
            total.assign_add(tf.cast(examples, total.dtype) * (x - tf.convert_to_tensor(w.value)))
        for total, statistic in zip(self.statistics_sums, self.statistics, strict=True):
            total.assign_add(tf.cast(examples, total.dtype) * tf.convert_to_tensor(statistic.value))
        self.counts.examples.assign_add(tf.cast(examples, tf.float64))

    def end_round(self, weights: Sequence[tf.Tensor], statistics: Sequence[tf.Tensor], rounds: tf.Tensor) -> None:
        """Assigns new global weights and statistics.

        Args:
          weights: new values.
          statistics: new values.
          rounds: scalar; number of rounds done, which becomes the optimizer's number of updates.
        """
        self._assign_weights(weights, rounds)
        for statistic, value in zip(self.statistics, statistics, strict=True):
            statistic.assign(value)

    def undo_round(self, rounds: tf.Tensor) -> None:
        """Assigns the global weights and statistics before the round; `rounds`: number of rounds done."""
        self.end_round(
            self.global_weights.values(), [tf.convert_to_tensor(value) for value in self._initial_statistics], rounds
        )

    def take_over(self) -> None:
        """Assigns the model's weights, which are equal on all replicas, to the global ones."""
        self.global_weights.take_over(self.weights)

    def _assign_weights(self, values: Sequence[tf.Tensor], updates: tf.Tensor | int) -> None:
        """Assigns weights and a number of updates, and resets the optimizer's state."""
        count = self._optimizer.iterations
        with self._strategy.own_copies([*self.weights, *self._slots, count]):
            for weight, value in zip(self.weights, values, strict=True):
                weight.assign(value)
            for slot, value in zip(self._slots, self._initial_slots.tensors(), strict=True):
                slot.assign(value)
            count.assign(tf.cast(updates, count.dtype))


def _states(name: str, variables: Sequence[keras.Variable]) -> list[State]:
    return [State(f"round/{name}/{v.path}", tuple(v.shape), tf.as_dtype(v.dtype), per_replica=True) for v in variables]
