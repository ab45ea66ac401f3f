"""State that the replicas of a round keep: the global state from which clients start, and sums over their clients."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import State, Strategy
from tfdist.step import randomness
from tfdist.step.side_effects import assign
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
      statistics: moving statistics of the model, such as those of BatchNormalization, and integer and bool variables of
        its layers, such as counters.
      statistics_sums: for each of them, the sum over a replica's clients of n_k times its value, or, of an integer, times
        its change, which is exact.
      counts: scalars.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, outer: str):
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
        self.statistics = [*keras_internals.moving_statistics(model), *randomness.counters(model)]
        self.global_weights = GlobalWeights(model.trainable_variables, strategy, outer)
        self.changes = strategy.allocate(_states("change", self.weights))
        self.statistics_sums = strategy.allocate(_states("sum", self.statistics, integers=tf.float64))
        self._initial_statistics = strategy.allocate(_states("start", self.statistics))
        counts = [State(f"round/{name}", (), tf.float64, per_replica=True) for name in Counts._fields]
        self.counts = Counts(*strategy.allocate(counts))

    def begin_round(self) -> None:
        """Resets the sums; all replicas have the global weights and statistics."""
        for total in (*self.changes, *self.statistics_sums, *self.counts):
            total.assign(tf.zeros(total.shape, total.dtype))
        assign(self._initial_statistics, [statistic.value for statistic in self.statistics])

    def begin_client(self) -> None:
        """Assigns the global weights and statistics, and resets the optimizer."""
        self._assign_weights(self.global_weights.values(), 0)
        self._assign_statistics(self._initial_statistics)

    def end_client(self, examples: tf.Tensor) -> None:
        """Adds what a client with this number of examples has learned."""
        for total, x, w in zip(self.changes, self.global_weights.values(), self.weights, strict=True):
            total.assign_add(tf.cast(examples, total.dtype) * (x - tf.convert_to_tensor(w.value)))
        of_client = zip(self.statistics_sums, self.statistics, self._initial_statistics, strict=True)
        for total, statistic, initial in of_client:
            value = tf.cast(tf.convert_to_tensor(statistic.value), total.dtype)
            if not initial.dtype.is_floating:
                value -= tf.cast(tf.convert_to_tensor(initial), total.dtype)
            total.assign_add(tf.cast(examples, total.dtype) * value)
        self.counts.examples.assign_add(tf.cast(examples, tf.float64))

    def end_round(
        self, weights: Sequence[tf.Tensor], statistics: Sequence[tf.Tensor | tf.Variable], rounds: tf.Tensor
    ) -> None:
        """Assigns new global weights and statistics.

        Args:
          weights: new values.
          statistics: new values.
          rounds: scalar; number of rounds done, which becomes the optimizer's number of updates.
        """
        self._assign_weights(weights, rounds)
        self._assign_statistics(statistics)

    def means(self, of_sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the statistics whose `statistics_sums` over all replicas have these means; integers are rounded."""
        pairs = zip(of_sums, self._initial_statistics, strict=True)
        return [mean if initial.dtype.is_floating else _changed(initial, mean) for mean, initial in pairs]

    def undo_round(self, rounds: tf.Tensor) -> None:
        """Assigns the global weights and statistics before the round; `rounds`: number of rounds done."""
        self.end_round(self.global_weights.values(), self._initial_statistics, rounds)

    def take_over(self) -> None:
        """Assigns the model's weights, which are equal on all replicas, to the global ones."""
        self.global_weights.take_over(self.weights)

    def _assign_statistics(self, values: Sequence[tf.Tensor | tf.Variable]) -> None:
        with self._strategy.own_copies(self.statistics):
            assign(self.statistics, [tf.convert_to_tensor(value) for value in values])

    def _assign_weights(self, values: Sequence[tf.Tensor], updates: tf.Tensor | int) -> None:
        """Assigns weights and a number of updates, and resets the optimizer's state."""
        count = self._optimizer.iterations
        with self._strategy.own_copies([*self.weights, *self._slots, count]):
            assign(self.weights, values)
            assign(self._slots, self._initial_slots.tensors())
            count.assign(tf.cast(updates, count.dtype))


def _changed(initial: tf.Variable, change: tf.Tensor) -> tf.Tensor:
    """Returns an integer or bool value after a change, rounded."""
    value, change = tf.convert_to_tensor(initial), tf.round(change)
    if initial.dtype.is_bool:
        return tf.not_equal(tf.cast(value, change.dtype) + change, 0)
    return value + tf.cast(change, value.dtype)


def _states(name: str, variables: Sequence[keras.Variable], integers: tf.DType | None = None) -> list[State]:
    """Returns a state like each variable; `integers`: dtype of those that are not floating, instead of their own."""
    dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
    dtypes = [dtype if dtype.is_floating or integers is None else integers for dtype in dtypes]
    pairs = zip(variables, dtypes, strict=True)
    return [State(f"round/{name}/{v.path}", tuple(v.shape), dtype, per_replica=True) for v, dtype in pairs]
