"""One training step of a replica that trains locally: its loss is the mean over its own rows, and nothing is sent."""

import abc
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import OneReplica
from tfdist.data.batches import count_rows
from tfdist.distribution.strategy import HasCollectives, State
from tfdist.gradients import Sum
from tfdist.step import loss
from tfdist.step.metrics import LossShare, ModelMetrics
from tfdist.step.reduction import run_if
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Computed, Step
from tfdist.step.validation import inner_optimizer

ROWS = State("exchange/rows", (), tf.float64, per_replica=True)
_STOPPED = State("exchange/stopped", (), tf.bool, per_replica=True)


class LocalResult(NamedTuple):
    """The result of a step, on each replica.

    Attributes:
      loss: scalar; mean over the replica's rows.
      rows: scalar int32; number of rows.
      finite: scalar bool; whether loss and gradients were finite.
      may_continue: scalar bool; False if the run must end.
      norm: scalar; norm of the replica's gradients, if requested.
      arrived: see `Computed`.
      busy: see `Computed`.
    """

    loss: tf.Tensor
    rows: tf.Tensor
    finite: tf.Tensor
    may_continue: tf.Tensor
    norm: tf.Tensor
    arrived: tf.Tensor
    busy: tf.Tensor


class LocalStep(Step, abc.ABC):
    """A step on a replica's own rows and weights: its loss is their mean, and updates change no other replica."""

    @property
    def optimizer(self) -> keras.Optimizer:
        """The optimizer that updates the weights."""
        return inner_optimizer(self._model.optimizer)

    @abc.abstractmethod
    def _count(self, computed: Computed, rows: tf.Tensor) -> None:
        """Counts a step that was applied, with this number of rows. A replica function."""

    def _apply_if(self, condition: tf.Tensor, computed: Computed, rows: tf.Tensor) -> None:
        """Applies and counts a step, or skips it. A replica function, without communication."""
        unused = self.unused()

        def apply() -> None:
            self.apply(computed, unused)
            self._count(computed, rows)

        run_if(condition, apply, lambda: self.skip(computed))

    def _apply_gradients(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        """See base class."""
        self._strategy.apply_locally(self.optimizer, gradients, variables)

    def _divisor(self, batch: Any, batch_size: int | tf.Tensor) -> tf.Tensor:
        """See base class."""
        return count_rows(batch)

    def _for_metrics(self, share: LossShare) -> LossShare:
        """See base class."""
        weight = loss.floating(share.batch_size) / loss.floating(self.settings.batch_size)
        terms = [term * tf.cast(weight, term.dtype) for term in share.terms]
        return LossShare(share.value * tf.cast(weight, share.value.dtype), terms, share.rows, self.settings.batch_size)


class LocalSGDStep(LocalStep):
    """A step of one model on each replica's own rows and weights."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        store: StateStore,
        settings: Settings,
        metrics: ModelMetrics,
    ):
        """Initializes the step and creates its state.

        Args:
          model: model compiled and built under the strategy's scope.
          strategy: strategy whose replicas run the step.
          store: store of the state.
          settings: options of the step.
          metrics: metrics of the model.
        """
        super().__init__(model, strategy, Sum(), store, settings, metrics, OneReplica())
        self._rows, self._stopped = store.variables([ROWS, _STOPPED])

    def begin(self) -> None:
        """Starts a call of the loop. A replica function."""
        self._stopped.assign(False)

    def train(self, batch: Any, step: tf.Tensor, with_norm: tf.Tensor) -> LocalResult:
        """Computes and applies one step. A replica function, without communication.

        After a step that was not finite, without loss scaling, the replica's weights stay as they were before it.

        Args:
          batch: this replica's rows.
          step: scalar int64; number of steps done so far.
          with_norm: scalar bool; whether to compute the norm of the gradients.
        """
        stopped = tf.convert_to_tensor(self._stopped)
        computed = self.compute(batch, step, with_norm)
        computed = self.held(computed, tf.logical_not(stopped))
        rows = count_rows(batch)
        self._apply_if(computed.finite, computed, rows)
        may_continue = computed.finite
        if self._scale:
            may_continue = tf.logical_or(may_continue, computed.scale[-1] < self.settings.max_skipped_steps)
        self._stopped.assign(tf.logical_not(may_continue))
        floatx = keras.config.floatx()
        return LocalResult(
            tf.cast(computed.loss, floatx),
            rows,
            computed.finite,
            may_continue,
            tf.cast(computed.norm, floatx),
            computed.arrived,
            computed.busy,
        )

    def _count(self, computed: Computed, rows: tf.Tensor) -> None:
        """See base class."""
        self._rows.assign_add(tf.cast(rows, self._rows.dtype))
