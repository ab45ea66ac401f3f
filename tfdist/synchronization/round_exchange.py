"""The exchange at the end of a round: the clients' mean change updates the global weights; see `FedAvg`."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import Recording
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import Bucketed, Sum
from tfdist.step.named_specs import named_specs
from tfdist.step.reduction import Reduction, global_norm
from tfdist.synchronization.round_state import Counts, RoundState


class Round(NamedTuple):
    """The reduced results of a round, equal on all replicas, except `reducer_state`.

    Attributes:
      change: for each weight, the mean over clients of x - w_k.
      statistics: for each moving statistic and integer of a layer, its mean over clients.
      reducer_state: the reducer's new state.
      loss: scalar of dtype floatx; mean over all rows; NaN if a client's was not finite.
      finite: scalar bool; whether everything was finite.
      norm: scalar of dtype floatx; norm of `change`.
    """

    change: list[tf.Tensor]
    statistics: list[tf.Tensor]
    reducer_state: list[tf.Tensor]
    loss: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor


def round_specs(weights: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    """Returns names, shapes and dtypes of what an exchange reduces: a change per variable, and the counts."""
    return named_specs(weights, *(f"exchange/{name}" for name in Counts._fields))


class RoundExchange:
    """Reduces and applies the results of rounds.

    Attributes:
      recording: the calls of the latest trace that send changes.
    """

    def __init__(self, strategy: Strategy, reduction: Reduction, state: RoundState):
        """Initializes the exchange.

        Args:
          strategy: strategy of the replicas.
          reduction: sums changes over replicas.
          state: variables of the rounds.
        """
        self._strategy, self._reduction, self._round = strategy, reduction, state
        self.recording: Recording | None = None

    def reduce(self, examples: float) -> Round:
        """Reduces the sums of all replicas. A replica function.

        Args:
          examples: expected examples of a replica in a round: changes are sent relative to them, so that they keep their
            size, which lossy dtypes may need.
        """
        floatx = keras.config.floatx()
        self.recording = Recording(self._strategy.step_collectives)
        changes = _relative(self._round.changes, examples)
        counts = [tf.cast(count, floatx) for count in _relative(self._round.counts, examples)]
        reduced = self._reduction.reduce([*changes, *counts], self.recording, name="round")
        totals, of_all = reduced.totals[: len(changes)], Counts(*reduced.totals[len(changes) :])
        change = [tf.math.divide_no_nan(total, tf.cast(of_all.examples, total.dtype)) for total in totals]
        sums = _relative(self._round.statistics_sums, examples)
        if sums:
            sums = Bucketed(Sum()).reduce(sums, [], self.recording, name="round/statistics").totals
        statistics = self._round.means([total / tf.cast(of_all.examples, total.dtype) for total in sums])
        finite = tf.logical_and(reduced.all_finite(*change, of_all.loss), tf.equal(of_all.not_finite, 0))
        loss = tf.where(finite, tf.math.divide_no_nan(of_all.loss, of_all.rows), float("nan"))
        return Round(change, statistics, reduced.state, loss, finite, tf.cast(global_norm(change), floatx))

    def apply(self, result: Round, number: tf.Tensor) -> None:
        """Updates the global weights and all state. A replica function; `number` of the round."""
        weights = self._round.global_weights.update(result.change)
        self._round.end_round(weights, result.statistics, number + 1)
        self._reduction.assign(result.reducer_state)

    def undo(self, number: tf.Tensor) -> None:
        """Restores everything from before the round. A replica function; `number` of the round."""
        self._round.undo_round(number)


def _relative(totals: Sequence[tf.Variable], examples: float) -> list[tf.Tensor]:
    """Returns totals of a replica divided by its expected examples."""
    return [tf.convert_to_tensor(total) / tf.constant(examples, total.dtype) for total in totals]
