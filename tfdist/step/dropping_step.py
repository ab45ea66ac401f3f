"""A training step in which a replica that is late leaves out its remaining micro-steps: DropCompute.

Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute variance reduction",
NeurIPS 2023, arXiv:2306.10598.

The rows that count are known only when all replicas have stopped. Each of them therefore keeps the gradients of the sums that
the loss is made of, undivided, one for each divisor (`loss.summands`). Their divisors and the numbers of rows are summed over
replicas in one small message, and with them the gradients become shares of the loss of all rows that were computed, as if no
other rows had been in the batch. A loss with one divisor costs a single backward pass, as in other steps; each further one
costs another backward pass, and memory for another set of gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import Collectives, using
from tfdist.distribution import clock
from tfdist.distribution.strategy import HasCollectives, State
from tfdist.gradients import Reducer, unscaled
from tfdist.gradients.accumulation import Accumulated, accumulated_until
from tfdist.step import loss
from tfdist.step.metrics import LossShare, ModelMetrics, track_outputs
from tfdist.step.micro_step_collectives import MicroStepCollectives
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step, dense

# Seconds, and the number of replicas for which they were measured: others have other shares of a batch.
LIMIT = State("straggler/limit", (2,), tf.float64, per_replica=False, initial=float("inf"))


class _Part(NamedTuple):
    """What the rows of a micro-step give, such that the sums over micro-steps and replicas are those of all rows.

    Attributes:
      gradients: of each of `losses.divided` and `losses.whole`, the gradients of the variables.
      losses: the parts of the loss.
      outputs: for each loss with which the model was compiled, its sum, and its divisor unless it is not divided.
      rows: scalar int32; number of rows.
      state: see `MicroStepState.end`.
    """

    gradients: list[list[tf.Tensor]]
    losses: loss.Summands
    outputs: list[list[tf.Tensor]]
    rows: tf.Tensor
    state: list[tf.Tensor]


class DroppingStep(Step):
    """A step in which each replica stops after the micro-step in which it exceeds a limit of time."""

    dropped_dtypes = (tf.int32, tf.float64)

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        reducer: Reducer,
        store: StateStore,
        settings: Settings,
        metrics: ModelMetrics,
        collectives: Collectives | None = None,
    ):
        """Initializes the step and creates its state, with a measured limit also that; see `Step`."""
        super().__init__(model, strategy, reducer, store, settings, metrics, collectives)
        self._limit = store.variables([LIMIT])[0] if settings.straggler.is_measured else None

    def _local_gradients(self, batch: Any, batch_size: int | tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        """Returns the undivided gradients of the micro-steps that began in time, and what else they have summed."""
        differentiate = self._compiled(self._differentiate_each)
        state = self._micro_step_state
        state.begin()

        def micro_step(rows: Any) -> _Part:
            with state.micro_step():
                found, outputs = differentiate(rows, batch_size)
            _, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
            # The means of the outputs' losses need the divisors: `_divided` updates them.
            self._metrics.update(y, outputs, weight, LossShare(tf.zeros([]), [], found.rows, batch_size))
            return found._replace(state=state.end(found.rows))

        began = clock.time_after(batch)
        with using(MicroStepCollectives(self._recorded)):
            found = accumulated_until(
                micro_step,
                batch,
                self.settings.micro_steps,
                lambda sums: clock.time_after(sums) - began,
                self._seconds_at_most(),
            )
        state.set_means(found.sums.state)
        rows = tf.shape(tf.nest.flatten(batch)[0])[0]
        return [gradient for each in found.sums.gradients for gradient in each], (found, rows, batch_size)

    def _seconds_at_most(self) -> tf.Tensor:
        if self._limit is None:
            return tf.constant(self.settings.straggler.after, tf.float64)
        seconds, replicas = tf.unstack(tf.convert_to_tensor(self._limit))
        return tf.where(tf.equal(replicas, self._strategy.replicas), seconds, float("inf"))

    def _differentiate_each(self, batch: Any, batch_size: int | tf.Tensor) -> tuple[_Part, Any]:
        scale = tf.convert_to_tensor(self._scale[0]) if self._scale else None

        def losses_of(batch: Any) -> tuple[list[tf.Tensor], Any]:
            rows, outputs, parts = self._forward(batch, batch_size)
            found = loss.summands(self._model, parts, rows)
            # Gradients of means, not of sums over many rows, as float16 has a small range.
            found = found._replace(divided=[x / loss.floating(batch_size) for x in found.divided])
            values = [*found.divided, *found.whole]
            scaled = values if scale is None else [x * tf.cast(scale, x.dtype) for x in values]
            return scaled, (found, _sums_of_outputs(parts), rows, outputs)

        each, (found, sums, rows, outputs) = self._strategy.gradients_of_each(losses_of, self.variables, batch)
        self._without_gradient.append(
            frozenset(i for i, of_one in enumerate(zip(*each, strict=True)) if all(g is None for g in of_one))
        )
        gradients = [[dense(g, v) for g, v in zip(of_one, self.variables, strict=True)] for of_one in each]
        if scale is not None:
            gradients = [[unscaled(g, scale) for g in of_one] for of_one in gradients]
        return _Part(gradients, found, sums, rows, []), outputs

    def _divided(self, gradients: list[tf.Tensor], found: Any) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
        """See base class; sums the divisors over replicas, in one message."""
        accumulated, rows, batch_size = found
        part: _Part = accumulated.sums
        values = [*part.losses.divided, *part.losses.whole]
        each = [gradients[i * len(self.variables) :][: len(self.variables)] for i in range(len(values))]
        own = [part.losses.divisors, [sums[-1] for sums in part.outputs], [tf.cast(part.rows, tf.float64)]]
        (divisors, of_outputs, [used]), dropped = self._summed(own, rows - part.rows, accumulated)
        # Until here, they were divided by the rows of the whole batch.
        factors = [tf.math.divide_no_nan(tf.cast(batch_size, tf.float64), divisor) for divisor in divisors]
        one = tf.ones([], tf.float64)
        recorded = [*part.losses.divided, *part.losses.recorded]
        of_recorded = [*factors, one, tf.math.divide_no_nan(one, used)][: len(recorded)]
        factors += [one] * len(part.losses.whole)
        self._track_outputs(part, of_outputs, used)
        whole = [_weighted(factors, of_one) for of_one in zip(*each, strict=True)]
        return whole, _weighted(of_recorded, recorded), dropped

    def _summed(
        self, own: list[list[tf.Tensor]], rows: tf.Tensor, accumulated: Accumulated
    ) -> tuple[list[list[tf.Tensor]], list[tf.Tensor]]:
        """Returns sums over replicas, and what each replica has dropped.

        Args:
          own: scalars float64 of this replica.
          rows: scalar int32; rows that this replica has left out.
          accumulated: its micro-steps.

        Returns:
          The sums, in the structure of `own`, and what was dropped; see `Computed`.
        """
        replicas = self._strategy.replicas
        here = tf.one_hot(self._strategy.collectives.rank, replicas, dtype=tf.float64)
        counts = [here * tf.cast(x, tf.float64) for x in (rows, accumulated.planned - accumulated.micro_steps)]
        flat = tf.nest.flatten(own)
        [sums] = self._recorded.all_reduce([tf.concat([tf.stack(flat), *counts], 0)], name="loss/used_rows")
        of_replicas = tf.cast(tf.reshape(sums[len(flat) :], [2, replicas]), tf.int32)
        return tf.nest.pack_sequence_as(own, tf.unstack(sums[: len(flat)])), [of_replicas, accumulated.seconds]

    def _track_outputs(self, part: _Part, divisors: list[tf.Tensor], used: tf.Tensor) -> None:
        """Updates the means of the outputs' losses, in which each step has equal weight."""
        shares = [
            sums[0] if len(sums) == 1 else tf.math.divide_no_nan(sums[0], divisor)
            for sums, divisor in zip(part.outputs, divisors, strict=True)
        ]
        track_outputs(self._metrics.losses, shares, part.rows, used)


def _sums_of_outputs(parts: list[loss.Term]) -> list[list[tf.Tensor]]:
    pairs = [[tf.cast(part.numerator, tf.float64), tf.cast(part.denominator, tf.float64)] for part in parts]
    return [pair[:1] if part.is_sum else pair for part, pair in zip(parts, pairs, strict=True)]


def _weighted(factors: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(factor, x.dtype) * x for factor, x in zip(factors, tensors, strict=True)])
