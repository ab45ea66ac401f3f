"""One training step of a replica that trains locally: its loss is the mean over its own rows, and nothing is sent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.data.batches import count_rows
from tfdist.distribution.strategy import State
from tfdist.gradients import Sum
from tfdist.step.gradient_source import GradientSource
from tfdist.step.reduction import Computed, run_if
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step

ROWS = State("exchange/rows", (), tf.float64, per_replica=True)
_STOPPED = State("exchange/stopped", (), tf.bool, per_replica=True)


class LocalResult(NamedTuple):
    """The result of a step, on each replica.

    Attributes:
      computed: result of `compute`.
      rows: scalar int32; number of rows.
      may_continue: scalar bool; False if the run must end.
    """

    computed: Computed
    rows: tf.Tensor
    may_continue: tf.Tensor


class LocalStep(Step):
    """A step on a replica's own rows and weights: its loss is their mean, and updates change no other replica."""

    def _apply_if(self, condition: tf.Tensor, computed: Computed, count: Callable[[], Any]) -> None:
        """Applies and counts a step, or skips it. A replica function, without communication."""
        unused = self.unused()

        def apply() -> None:
            self.apply(computed, unused)
            count()

        run_if(condition, apply, lambda: self.skip(computed))

    def _apply_gradients(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        """See base class."""
        self._strategy.apply_locally(self.optimizer, gradients, variables)


class LocalSGDStep(LocalStep):
    """A step of one model on each replica's own rows and weights."""

    def __init__(self, source: GradientSource, store: StateStore):
        """Initializes the step and creates its state.

        Args:
          source: local gradients.
          store: store of the state.
        """
        super().__init__(source, Sum(), store)
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
        computed = self.gated(computed, tf.logical_not(stopped))
        rows = count_rows(batch)
        self._apply_if(computed.finite, computed, lambda: self._rows.assign_add(tf.cast(rows, self._rows.dtype)))
        may_continue = self.may_continue(computed.finite, computed.scale)
        self._stopped.assign(tf.logical_not(may_continue))
        return LocalResult(computed, rows, may_continue)
