"""One step of a client on a replica, between the beginning and the end of the client's part in a round."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import OneReplica
from tfdist.data.client_examples import ReplicaTurn
from tfdist.distribution.strategy import HasCollectives
from tfdist.gradients import Sum
from tfdist.grammar.sync import FedAvg
from tfdist.step.local_step import LocalStep
from tfdist.step.metrics import ModelMetrics
from tfdist.step.reduction import run_if
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Computed
from tfdist.synchronization.round_state import RoundState


class Times(NamedTuple):
    """When a replica had its batch, and how long it computed; see `Computed`."""

    arrived: tf.Tensor
    busy: tf.Tensor


class ClientStep(LocalStep):
    """A step of a client: its optimizer and its weights are its own, and nothing is sent.

    With the proximal term, the loss is that of FedProx, F_k(w) + mu / 2 |w - x|^2, whose gradient has mu (w - x); losses
    that are recorded are without this term.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        store: StateStore,
        settings: Settings,
        metrics: ModelMetrics,
        sync: FedAvg,
        state: RoundState,
    ):
        """Initializes the step; for the other arguments see `LocalSGDStep`.

        Args:
          model: the model.
          strategy: its strategy.
          store: store of the state.
          settings: options of the step; its batch size is the number of examples of a round.
          metrics: metrics of the model.
          sync: the clients.
          state: variables of the rounds.
        """
        super().__init__(model, strategy, Sum(), store, settings, metrics, OneReplica())
        self._sync, self._of_round = sync, state

    def train(self, turn: ReplicaTurn, number: tf.Tensor) -> Times:
        """Computes and applies one step of a client. A replica function, without communication.

        Args:
          turn: the client's batch; if no row of it counts, nothing changes.
          number: scalar int64; number of the round.
        """
        state, counts = self._of_round, self._of_round.counts
        run_if(turn.begins, state.begin_client)
        draw = tf.stack([number, turn.client + self._sync.clients * turn.number])
        computed = self.compute(turn.batch, draw, tf.constant(False))
        active = tf.logical_and(turn.rows > 0, tf.equal(tf.convert_to_tensor(counts.not_finite), 0))
        self._apply_if(tf.logical_and(active, computed.finite), computed, turn.rows)
        failed = tf.logical_and(active, tf.logical_not(computed.finite))
        counts.not_finite.assign_add(tf.cast(failed, tf.float64))
        run_if(turn.ends, lambda: state.end_client(turn.client_examples))
        return Times(computed.arrived, computed.busy)

    def _count(self, computed: Computed, rows: tf.Tensor) -> None:
        """See base class."""
        counts, rows = self._of_round.counts, tf.cast(rows, tf.float64)
        counts.rows.assign_add(rows)
        counts.loss.assign_add(tf.cast(computed.loss, tf.float64) * rows)

    def _local_gradients(self, batch: Any, batch_size: int | tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """See base class; adds the gradient of the proximal term."""
        gradients, value = super()._local_gradients(batch, batch_size)
        if not self._sync.proximal:
            return gradients, value
        of_term = [
            tf.constant(self._sync.proximal, x.dtype) * (tf.convert_to_tensor(w.value) - x)
            for w, x in zip(self.variables, self._of_round.global_weights.values(), strict=True)
        ]
        return [tf.convert_to_tensor(g) + term for g, term in zip(gradients, of_term, strict=True)], value

    def _drawn_from(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int, int]:
        """See base class: the round, and client and batch in the place of a replica."""
        return step[0], tf.cast(step[1], tf.int32), self._sync.clients + 1
