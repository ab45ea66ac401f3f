"""One step of a client on a replica, between the beginning and the end of the client's part in a round."""

from typing import Any

import tensorflow as tf

from tfdist.data.client_examples import ReplicaTurn
from tfdist.gradients import Sum
from tfdist.grammar.sync import FedAvg
from tfdist.step.gradient_source import GradientSource, LocalGradients
from tfdist.step.local_step import LocalStep
from tfdist.step.reduction import Computed, run_if
from tfdist.step.state_store import StateStore
from tfdist.synchronization.global_weights import GlobalWeights
from tfdist.synchronization.round_state import RoundState


class ClientGradients(GradientSource):
    """The gradients of a client.

    With the proximal term, the loss is that of FedProx, F_k(w) + mu / 2 |w - x|^2, whose gradient has mu (w - x); losses
    that are recorded are without this term.
    """

    def __init__(self, *args: Any, sync: FedAvg, global_weights: GlobalWeights):
        """Initializes the source; see base class.

        Args:
          *args: see base class; the batch size of the settings is the number of examples of a round.
          sync: the clients.
          global_weights: x.
        """
        super().__init__(*args, is_local=True)
        self.sync, self._global_weights = sync, global_weights

    def draws(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int, int]:
        """See base class: the round, and client and batch in the place of a replica."""
        return step[0], tf.cast(step[1], tf.int32), self.sync.clients + 1

    def _of_rows(self, *args: Any) -> LocalGradients:
        """See base class."""
        gradients, value = super()._of_rows(*args)
        if not self.sync.proximal:
            return LocalGradients(gradients, value)
        of_term = [
            tf.constant(self.sync.proximal, x.dtype) * (tf.convert_to_tensor(w.value) - x)
            for w, x in zip(self.variables, self._global_weights.values(), strict=True)
        ]
        return LocalGradients(
            [tf.convert_to_tensor(g) + term for g, term in zip(gradients, of_term, strict=True)], value
        )


class ClientStep(LocalStep):
    """A step of a client: its optimizer and its weights are its own, and nothing is sent."""

    source: ClientGradients

    def __init__(self, source: ClientGradients, store: StateStore, state: RoundState):
        """Initializes the step; `state`: variables of the rounds."""
        super().__init__(source, Sum(), store)
        self._of_round = state

    def train(self, turn: ReplicaTurn, number: tf.Tensor) -> Computed:
        """Computes and applies one step of a client. A replica function, without communication.

        Args:
          turn: the client's batch; if no row of it counts, nothing changes.
          number: scalar int64; number of the round.
        """
        state, counts = self._of_round, self._of_round.counts
        run_if(turn.begins, state.begin_client)
        draw = tf.stack([number, turn.client + self.source.sync.clients * turn.number])
        computed = self.compute(turn.batch, draw, tf.constant(False))
        active = tf.logical_and(turn.rows > 0, tf.equal(tf.convert_to_tensor(counts.not_finite), 0))

        def count() -> None:
            rows = tf.cast(turn.rows, tf.float64)
            counts.rows.assign_add(rows)
            counts.loss.assign_add(tf.cast(computed.loss, tf.float64) * rows)

        self._apply_if(tf.logical_and(active, computed.finite), computed, count)
        failed = tf.logical_and(active, tf.logical_not(computed.finite))
        counts.not_finite.assign_add(tf.cast(failed, tf.float64))
        run_if(turn.ends, lambda: state.end_client(turn.client_examples))
        return computed
