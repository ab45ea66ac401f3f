"""Computes the gradients of a step, at once or in micro-steps, and the state that micro-steps assign."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica, RecordingCollectives, current
from tfdist.data.batches import count_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import accumulate_gradients, unscale
from tfdist.parameter_server.dynamic_embedding_tables import keyed_layers
from tfdist.row_semantics.explanation import Communication
from tfdist.step import loss, randomness
from tfdist.step.data_check import compilation_error
from tfdist.step.layer_state import MEAN_DTYPE, assign, user_state, weighted_means, weighted_terms
from tfdist.step.metrics import LossShare, ModelMetrics, weight_scalars
from tfdist.step.partitioned_step import all_rows_step, communication
from tfdist.step.reduction import ComputeResult, global_norm
from tfdist.step.settings import Settings, named_specs
from tfdist.step.state_store import StateStore


class MicroStepState:
    """Layer state for which every micro-step begins with the value before the step, and the step assigns a row-weighted mean.

    Step counters and moving means therefore change once per step, for any number of micro-steps. Integers and spectrally
    normalized weights, which do not depend on rows, keep the values of the last micro-step. The methods are called in
    replica functions.

    Without loops, one graph would assign metrics and moving statistics in each micro-step, and DTensor may silently apply
    only one of these updates (tests/traps/dtensor_test.py): they are assigned once, at the end.
    """

    def __init__(self, model: keras.Model, strategy: Strategy):
        self._strategy = strategy
        self._means, self._last_values = user_state(model, strategy)
        mean_ids = {id(variable) for variable in self._means}
        self._last_values += [v for v in keras_internals.spectral_norm_variables(model) if id(v) not in mean_ids]
        self._initial_values: list[tf.Tensor] = []
        self._assignments: dict[int, tuple[keras.Variable, Any]] | None = None  # None if micro-steps assign directly

    def specs(self) -> list[tf.TensorSpec]:
        """Returns the shapes and dtypes of the result of `end`."""
        specs = [tf.TensorSpec(variable.shape, MEAN_DTYPE) for variable in self._means]
        return [*specs, tf.TensorSpec([], MEAN_DTYPE)] if specs else []

    def begin(self, *, is_unrolled: bool) -> None:
        """Stores the state before the first micro-step; `is_unrolled` if one graph contains all micro-steps."""
        self._assignments = {} if is_unrolled else None
        self._initial_values = [tf.identity(variable) for variable in (*self._means, *self._last_values)]

    @contextlib.contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of a micro-step, which starts with the state before the step and assigns only this replica's copies."""
        variables = [*self._means, *self._last_values]
        with self._deferred_assignments(), self._strategy.own_copies(variables):
            assign(variables, self._initial_values)
            yield

    @contextlib.contextmanager
    def _deferred_assignments(self) -> Iterator[None]:
        """Context in which variables have the values that previous micro-steps of the same graph assigned."""
        if self._assignments is None:
            yield
            return
        with keras_internals.RecordedScope(self._assignments.values(), read=keras_internals.value_of) as scope:
            yield
        self._assignments |= {id(variable): (variable, value) for variable, value in scope.assignments}

    def end(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the terms for `set_means` at the end of a micro-step with this number of rows."""
        return weighted_terms(self._means, rows) if self._means else []

    def set_means(self, sums: Sequence[tf.Tensor]) -> None:
        """Assigns the means, and the values of unrolled micro-steps, after the last micro-step."""
        with self._deferred_assignments():
            assign(self._means, weighted_means(sums, self._means) if self._means else [])
        for variable, value in (self._assignments or {}).values():
            variable.assign(value)


class LocalGradients(NamedTuple):
    """The contribution of a replica to a step."""

    # Gradient of each variable: a tensor, or rows if the reducer accepts them
    gradients: list[tf.Tensor | tf.IndexedSlices]
    loss: tf.Tensor  # scalar; this replica's share of the loss


class GradientSource:
    """Computes the gradients of one model and updates its metrics.

    Attributes:
      strategy: strategy whose replicas run the step.
      variables: the trainable variables.
      seeds: states of the seed generators.
      scale: state of the loss scale; empty without loss scaling.
      is_local: whether each replica trains on its own rows and weights.
      unused_indices: for each trace, the indices of the variables for which this replica has no gradient.
    """

    has_local_time = True  # whether the time of the computation excludes waiting for other replicas
    keeps_gradients = False  # whether gradients are summed without communication
    messages: RecordingCollectives | None = (
        None  # the calls between pipeline stages in the latest trace, if there are any
    )

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
        if (settings.jit_compile or settings.micro_steps > 1) and keyed_layers(model):
            raise InputError(
                "A model with a DynamicEmbedding must be trained in a single pass, without XLA. Received: jit_compile or "
                "accumulate_steps. Remove them."
            )
        self.model, self.strategy, self.settings, self.metrics = model, strategy, settings, metrics
        self.is_local = is_local
        self.collectives = OneReplica() if is_local else collectives or strategy.step_collectives
        self.variables = list(model.trainable_variables)
        self.seeds = randomness.seed_states(model)
        self.scale = store.variables(settings.scale_state())
        self.unused_indices: list[frozenset[int]] = []
        sparse = settings.sparse if settings.micro_steps == 1 else ()
        self._sends_rows = [spec.name in sparse for spec in named_specs(self.variables)]
        self._micro_step_state = MicroStepState(model, strategy)

    def random_seed_inputs(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int, int]:
        """Returns the step, the replica and the number of replicas that seed random layers."""
        has_whole_batches = self.strategy.training_shares[1] == 1
        collectives = OneReplica() if has_whole_batches else self.strategy.collectives
        return step, 0 if self.metrics.division == "whole" else collectives.rank, collectives.size

    def local_gradients(self, rows: ReplicaRows, step: tf.Tensor, collectives: Collectives) -> LocalGradients:
        """Computes the gradients of a replica's rows in step `step`, scalar int64. A replica function."""
        if not self.metrics.replicas_see_all_rows:
            batch_size = count_rows(rows.batch) if self.is_local else rows.batch_size
            return self._row_gradients(rows.batch, batch_size, step, collectives)
        rows = ReplicaRows(rows.batch, (rows.rows,), tf.convert_to_tensor(rows.batch_size))
        arguments = self.model, self.metrics.variables, self._one_device_step, rows, collectives
        result = all_rows_step(self.metrics.division, *arguments, self.settings.batch_size)
        result.assign()
        value = result.values["loss"]
        return LocalGradients(result.gradients, value / tf.cast(collectives.size, value.dtype))

    def communication(self, spec: Any) -> Communication:
        """Returns the communication of a partitioned step; `spec` is the structure of `tf.TensorSpec` of a batch."""
        return communication(self.model, self.metrics.variables, self._one_device_step, spec)

    def unused_variables(self) -> frozenset[int]:
        """Returns the indices of the variables for which this replica had no gradient in any trace."""
        return frozenset.intersection(*self.unused_indices) if self.unused_indices else frozenset()

    def agree(self, result: ComputeResult, with_gradient_norm: tf.Tensor) -> ComputeResult:
        """Returns the result with equal values on every process, and with the gradient norm if it is requested or needed."""
        if self.settings.clip.norm:
            return result._replace(norm=global_norm(result.gradients))
        return result._replace(
            norm=tf.cond(with_gradient_norm, lambda: global_norm(result.gradients), lambda: result.norm)
        )

    @property
    def loss_scale(self) -> tf.Tensor | None:
        """The current factor of the loss; None without loss scaling."""
        return tf.convert_to_tensor(self.scale[0]) if self.scale else None

    def _one_device_step(self, batch: Any) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        gradients, value = self._micro_step(self._differentiate, batch, count_rows(batch))
        return gradients, {"loss": value}

    def _row_gradients(
        self, batch: Any, batch_size: int | tf.Tensor, step: tf.Tensor, collectives: Collectives
    ) -> LocalGradients:
        """Computes the gradients of some of the `batch_size` rows of a batch, at once or in micro-steps."""
        differentiate = self._compile(self._differentiate)
        if self.settings.micro_steps == 1:
            return self._micro_step(differentiate, batch, batch_size)
        # The denominators of the whole batch are computed first, so micro-steps need no communication. Only the masks of this
        # forward pass are used; the rest of its graph is never run.
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        with self.strategy.layouts.compute_layouts(self.variables):
            values = [(variable, variable.value) for variable in self.model.variables]
            with keras.StatelessScope(state_mapping=values):  # this pass must not update metrics of layers
                outputs = self.strategy.layouts.lay_out_rows(self.model(x, training=False))
        parts = loss.terms(self.model, y, outputs, weight)
        totals = loss.totals(parts, batch_size, current())
        # Without loops, the graph contains all micro-steps.
        shards = 0 if self.strategy.compiles_loops else self.strategy.layouts.row_shards
        state = self._micro_step_state
        state.begin(is_unrolled=shards > 0)

        def micro_step(rows: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
            with state.micro_step():
                part = self.strategy.layouts.lay_out_rows(rows)
                gradients, value = self._micro_step(differentiate, part, batch_size, totals)
                return [*gradients, *state.end(count_rows(rows))], value

        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        dtype, all_specs = tf.as_dtype(keras.config.floatx()), [*specs, *state.specs()]
        sums, value = accumulate_gradients(micro_step, batch, self.settings.micro_steps, all_specs, dtype, shards)
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
        self.metrics.update(y, outputs, weight, self._scale_to_global_batch(share) if self.is_local else share)
        return LocalGradients(gradients, share.value)

    def _scale_to_global_batch(self, share: LossShare) -> LossShare:
        """Scales a local loss so that the shares of all replicas add up to the mean over the global batch."""
        batch_size = self.settings.batch_size
        weight = loss.to_floatx(share.batch_size) / loss.to_floatx(batch_size)
        value, *terms = (term * tf.cast(weight, term.dtype) for term in (share.value, *share.terms))
        return LossShare(value, terms, share.rows, batch_size)

    def _compile(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        if not self.settings.jit_compile:
            return differentiate
        compiled = tf.function(differentiate, jit_compile=True, autograph=False)

        def call_compiled(*args: Any) -> Any:
            try:
                return compiled(*args)
            except (RuntimeError, tf.errors.OpError) as error:
                raise compilation_error(str(error).splitlines()[0]) from error

        return compiled if isinstance(self.collectives, OneReplica) else call_compiled

    def _differentiate(
        self, batch: Any, batch_size: int | tf.Tensor, totals: list[tf.Tensor] | None = None
    ) -> tuple[list[tf.Tensor], LossShare, Any]:
        scale = self.loss_scale

        def scaled_loss(batch: Any) -> tuple[tf.Tensor, Any]:
            value, share, outputs = self._loss(batch, batch_size, totals)
            return (value if scale is None else value * tf.cast(scale, value.dtype)), (share, outputs)

        gradients, _, (share, outputs) = self.strategy.gradients(scaled_loss, self.variables, batch)
        self.unused_indices.append(frozenset(i for i, g in enumerate(gradients) if g is None))
        gradients = [
            g if sends_rows and isinstance(g, tf.IndexedSlices) else to_dense(g, v, self.strategy.gradient_shape(v))
            for g, v, sends_rows in zip(gradients, self.variables, self._sends_rows, strict=True)
        ]
        return [g if scale is None else unscale(g, scale) for g in gradients], share, outputs

    def _loss(self, batch: Any, batch_size: int | tf.Tensor, totals: list[tf.Tensor] | None) -> tuple[Any, ...]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        rows = tf.shape(keras.tree.flatten(x)[0])[0]
        with weight_scalars(loss.to_floatx(rows) / loss.to_floatx(batch_size)):
            outputs = self.strategy.layouts.lay_out_rows(self.model(x, training=True))
        parts = loss.terms(self.model, y, outputs, weight)
        if totals is None:
            totals = loss.totals(parts, batch_size, current())
        losses = keras_internals.data_losses(self.model), keras_internals.weight_losses(self.model)
        value, recorded_value, shares = loss.training_losses(losses, parts, totals, rows, batch_size)
        return value, LossShare(recorded_value, shares, rows, batch_size), outputs


def to_dense(
    gradient: tf.Tensor | tf.IndexedSlices | None, variable: keras.Variable, shape: tf.TensorShape | None = None
) -> tf.Tensor:
    """Returns a dense gradient: zeros for None, and rows scattered to their indices; see `Strategy.gradient_shape`."""
    shape = variable.shape if shape is None else shape
    if gradient is None:
        return tf.zeros(shape if shape.is_fully_defined() else tf.shape(variable.value), variable.dtype)
    tensor = tf.convert_to_tensor(gradient)
    tensor.set_shape(shape)  # tf.ensure_shape would be an operation that DTensor does not support
    return tensor
