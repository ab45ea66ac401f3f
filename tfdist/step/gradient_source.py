"""Gradients of a step: of a batch, or summed over micro-steps, with the state that these assign."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica, Recording, current, using
from tfdist.data.batches import count_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import accumulated, unscaled
from tfdist.row_semantics.explanation import Communication
from tfdist.step import loss, randomness
from tfdist.step.averaged_values import MEAN_DTYPE, means_of, weighted_terms
from tfdist.step.data_mismatch import not_compilable
from tfdist.step.metrics import LossShare, ModelMetrics, scalars_weighted
from tfdist.step.partitioned_step import communication, partitioned
from tfdist.step.reduction import Computed, global_norm
from tfdist.step.settings import Settings, named_specs
from tfdist.step.side_effects import assign, state_of_user
from tfdist.step.state_store import StateStore


class MicroStepState:
    """State that each micro-step begins as it was before the step, and of which a step leaves the mean, weighted by rows.

    So a counter of steps counts a step once, and a moving mean moves once, however many micro-steps there are. Integers and
    spectrally normalized weights, which do not depend on rows, are those of the last micro-step. The methods are called in
    replica functions.

    Without loops, metrics and moving statistics would be assigned in each micro-step of one graph, and DTensor may silently
    compile that so that only one of the updates counts (tests/traps/dtensor_test.py): they are assigned once, at the end.
    """

    def __init__(self, model: keras.Model, strategy: Strategy):
        self._strategy = strategy
        self._means, self._others = state_of_user(model, strategy)
        averaged = {id(variable) for variable in self._means}
        self._others += [v for v in keras_internals.spectrally_normalized(model) if id(v) not in averaged]
        self._before: list[tf.Tensor] = []
        self._assigned: dict[int, tuple[keras.Variable, Any]] | None = None  # None if micro-steps assign themselves

    def specs(self) -> list[tf.TensorSpec]:
        """Returns shapes and dtypes of what `end` returns."""
        specs = [tf.TensorSpec(variable.shape, MEAN_DTYPE) for variable in self._means]
        return [*specs, tf.TensorSpec([], MEAN_DTYPE)] if specs else []

    def begin(self, *, is_unrolled: bool) -> None:
        """Stores the state before the first micro-step; `is_unrolled`: whether one graph has all micro-steps."""
        self._assigned = {} if is_unrolled else None
        self._before = [tf.identity(variable) for variable in (*self._means, *self._others)]

    @contextlib.contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of a micro-step, which begins with the state before the step, and assigns only this replica's copies."""
        variables = [*self._means, *self._others]
        with self._assigning_later(), self._strategy.own_copies(variables):
            assign(variables, self._before)
            yield

    @contextlib.contextmanager
    def _assigning_later(self) -> Iterator[None]:
        """Context in which variables have the values that micro-steps have assigned so far."""
        if self._assigned is None:
            yield
            return
        with keras_internals.RecordedScope(self._assigned.values(), read=keras_internals.value_of) as scope:
            yield
        self._assigned |= {id(variable): (variable, value) for variable, value in scope.assigned}

    def end(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the summands for `set_means` at the end of a micro-step of this number of rows."""
        return weighted_terms(self._means, rows) if self._means else []

    def set_means(self, sums: Sequence[tf.Tensor]) -> None:
        """Assigns the means, and the values of unrolled micro-steps, after the last micro-step."""
        with self._assigning_later():
            assign(self._means, means_of(sums, self._means) if self._means else [])
        for variable, value in (self._assigned or {}).values():
            variable.assign(value)


class LocalGradients(NamedTuple):
    """The contribution of a replica to a step.

    Attributes:
      gradients: of each variable; a tensor, or rows if the reducer accepts them.
      loss: scalar; this replica's share of the loss.
    """

    gradients: list[tf.Tensor | tf.IndexedSlices]
    loss: tf.Tensor


class GradientSource:
    """Computes the gradients of one model and updates its metrics.

    Attributes:
      model: the model.
      strategy: strategy whose replicas run the step.
      settings: options of the step.
      metrics: metrics of the model.
      collectives: collectives of the replicas.
      variables: the trainable variables.
      seeds: states of the random layers.
      scale: state of the loss scale; empty without loss scaling.
      is_local: whether each replica trains on its own rows and weights.
      without_gradient: for each trace, the indices of the variables for which this replica has no gradient.
      has_own_time: whether the time of the computation is this replica's own, instead of one that contains waiting.
      keeps_gradients: whether nothing is sent to sum gradients.
      messages: the calls between stages of a pipeline in the latest trace; None if there are none.
    """

    has_own_time = True
    keeps_gradients = False
    messages: Recording | None = None

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        store: StateStore,
        settings: Settings,
        metrics: ModelMetrics,
        collectives: Collectives | None = None,
        *,
        is_local: bool = False,
    ):
        """Initializes the source and creates the state of the loss scale; by default, with the strategy's collectives."""
        self.model, self.strategy, self.settings, self.metrics = model, strategy, settings, metrics
        self.is_local = is_local
        self.collectives = OneReplica() if is_local else collectives or strategy.step_collectives
        self.variables = list(model.trainable_variables)
        self.seeds = randomness.seed_states(model)
        self.scale = store.variables(settings.scale_state())
        self.without_gradient: list[frozenset[int]] = []
        self._in_rows = [spec.name in settings.sparse for spec in named_specs(self.variables)]
        self._micro_step_state = MicroStepState(model, strategy)

    def draws(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int, int]:
        """Returns the step, the replica and the number of replicas from which random layers draw."""
        has_whole_batches = self.strategy.training_shares[1] == 1
        collectives = OneReplica() if has_whole_batches else self.strategy.collectives
        return step, collectives.rank, collectives.size

    def local(self, rows: ReplicaRows, step: tf.Tensor, collectives: Collectives) -> LocalGradients:
        """Computes the gradients of a replica's rows. A replica function.

        Args:
          rows: the rows.
          step: scalar int64; number of steps done so far.
          collectives: collectives of the replicas, which record the calls.
        """
        if not self.is_partitioned:
            batch_size = count_rows(rows.batch) if self.is_local else rows.batch_size
            return self._of_rows(rows.batch, batch_size, step, collectives)
        rows = ReplicaRows(rows.batch, (rows.rows,), tf.convert_to_tensor(rows.batch_size))
        result = partitioned(self.model, self.metrics.variables, self._of_one_device, rows, collectives)
        result.assign()
        value = result.values["loss"]
        return LocalGradients(result.gradients, value / tf.cast(collectives.size, value.dtype))

    @property
    def is_partitioned(self) -> bool:
        """Whether a replica computes its shares of what one device computes from all rows."""
        return self.metrics.count_all_rows

    def communication(self, spec: Any) -> Communication:
        """Returns the communication of a partitioned step; `spec`: structure of `tf.TensorSpec` of a batch."""
        return communication(self.model, self.metrics.variables, self._of_one_device, spec)

    def unused(self) -> frozenset[int]:
        """Returns the indices of the variables for which this replica had no gradient in any trace."""
        return frozenset.intersection(*self.without_gradient) if self.without_gradient else frozenset()

    def agreed(self, computed: Computed, with_norm: tf.Tensor) -> Computed:
        """Returns the result with the norm, if requested or needed, and the same values on every process."""
        if self.settings.clip.norm:
            return computed._replace(norm=global_norm(computed.gradients))
        return computed._replace(
            norm=tf.cond(with_norm, lambda: global_norm(computed.gradients), lambda: computed.norm)
        )

    def _of_one_device(self, batch: Any) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        gradients, value = self._micro_step(self._differentiate, batch, count_rows(batch))
        return gradients, {"loss": value}

    def _of_rows(
        self, batch: Any, batch_size: int | tf.Tensor, step: tf.Tensor, collectives: Collectives
    ) -> LocalGradients:
        """Computes the gradients of rows, at once or in micro-steps; `batch_size`: rows over which the loss is a mean."""
        differentiate = self._compiled(self._differentiate)
        if self.settings.micro_steps == 1:
            return self._micro_step(differentiate, batch, batch_size)
        # The denominators of the whole batch are computed first, so that nothing is sent between micro-steps. Only the
        # masks of this forward pass are used; the rest of its graph is never run.
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        with self.strategy.layouts.computing(self.variables):
            values = [(variable, variable.value) for variable in self.model.variables]
            with keras.StatelessScope(state_mapping=values):  # it must not update metrics of layers
                outputs = self.strategy.layouts.by_rows(self.model(x, training=False))
        parts = loss.terms(self.model, y, outputs, weight)
        totals = loss.totals(parts, batch_size, current())
        # Without loops, the graph contains all micro-steps.
        shards = 0 if self.strategy.compiles_loops else self.strategy.layouts.row_shards
        state = self._micro_step_state
        state.begin(is_unrolled=shards > 0)

        def micro_step(rows: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
            with state.micro_step():
                part = self.strategy.layouts.by_rows(rows)
                gradients, value = self._micro_step(differentiate, part, batch_size, totals)
                return [*gradients, *state.end(count_rows(rows))], value

        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        dtype, all_specs = tf.as_dtype(keras.config.floatx()), [*specs, *state.specs()]
        with using(_MicroStepCollectives(collectives)):
            sums, value = accumulated(micro_step, batch, self.settings.micro_steps, all_specs, dtype, shards)
        state.set_means(sums[len(specs) :])
        return LocalGradients(sums[: len(specs)], value)

    def _micro_step(
        self,
        differentiate: Callable[..., Any],
        batch: Any,
        batch_size: int | tf.Tensor,
        totals: list[tf.Tensor] | None = None,
    ) -> LocalGradients:
        gradients, share, outputs = differentiate(batch, batch_size, totals)
        _, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        self.metrics.update(y, outputs, weight, self._of_global_batch(share) if self.is_local else share)
        return LocalGradients(gradients, share.value)

    def _of_global_batch(self, share: LossShare) -> LossShare:
        """Returns the share of a local loss such that those of all replicas add up to the mean over the global batch."""
        batch_size = self.settings.batch_size
        weight = loss.floating(share.batch_size) / loss.floating(batch_size)
        terms = [term * tf.cast(weight, term.dtype) for term in share.terms]
        return LossShare(share.value * tf.cast(weight, share.value.dtype), terms, share.rows, batch_size)

    def _compiled(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        if not self.settings.jit_compile:
            return differentiate

        compiled = tf.function(differentiate, jit_compile=True, autograph=False)

        def without_communication(*args: Any) -> Any:
            try:
                return compiled(*args)
            except (RuntimeError, tf.errors.OpError) as error:
                raise not_compilable(str(error).splitlines()[0]) from error

        return compiled if isinstance(self.collectives, OneReplica) else without_communication

    def _differentiate(
        self, batch: Any, batch_size: int | tf.Tensor, totals: list[tf.Tensor] | None = None
    ) -> tuple[list[tf.Tensor], LossShare, Any]:
        scale = tf.convert_to_tensor(self.scale[0]) if self.scale else None

        def scaled_loss(batch: Any) -> tuple[tf.Tensor, Any]:
            value, share, outputs = self._loss(batch, batch_size, totals)
            return (value if scale is None else value * tf.cast(scale, value.dtype)), (share, outputs)

        gradients, _, (share, outputs) = self.strategy.gradients(scaled_loss, self.variables, batch)
        self.without_gradient.append(frozenset(i for i, g in enumerate(gradients) if g is None))
        takes_rows = self.settings.micro_steps == 1
        accepted = [
            g
            if takes_rows and in_rows and isinstance(g, tf.IndexedSlices)
            else dense(g, v, self.strategy.gradient_shape(v))
            for g, v, in_rows in zip(gradients, self.variables, self._in_rows, strict=True)
        ]
        return (accepted if scale is None else [unscaled(g, scale) for g in accepted]), share, outputs

    def _loss(self, batch: Any, batch_size: int | tf.Tensor, totals: list[tf.Tensor] | None) -> tuple[Any, ...]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        rows = tf.shape(keras.tree.flatten(x)[0])[0]
        with scalars_weighted(loss.floating(rows) / loss.floating(batch_size)):
            outputs = self.strategy.layouts.by_rows(self.model(x, training=True))
        parts = loss.terms(self.model, y, outputs, weight)
        if totals is None:
            totals = loss.totals(parts, batch_size, current())
        value = loss.training_loss(self.model, parts, totals, rows, batch_size=batch_size)
        recorded = loss.recorded_loss(self.model, value, parts, totals, rows, batch_size)
        return value, LossShare(*recorded, rows, batch_size), outputs


class _MicroStepCollectives(Recording):
    """Rejects communication between micro-steps, whose number may differ between replicas."""

    def _on_call(self, operation: str, tensors: Sequence[tf.Tensor], name: str) -> None:
        """See base class."""
        raise InputError(
            "A layer or loss that communicates takes the whole batch at once. Received: accumulate_steps > 1 and a "
            f"call of {operation} ({name}). Leave out accumulate_steps."
        )


def dense(
    gradient: tf.Tensor | tf.IndexedSlices | None, variable: keras.Variable, shape: tf.TensorShape | None = None
) -> tf.Tensor:
    """Returns a dense gradient, which all replicas can send: zeros for None, rows scattered to their indices.

    Args:
      gradient: the gradient of a variable.
      variable: the variable.
      shape: see `Strategy.gradient_shape`; by default that of the variable.
    """
    shape = variable.shape if shape is None else shape
    if gradient is None:
        return tf.zeros(shape if shape.is_fully_defined() else tf.shape(variable.value), variable.dtype)
    tensor = tf.convert_to_tensor(gradient)
    tensor.set_shape(shape)  # tf.ensure_shape would be an operation that DTensor does not support
    return tensor
