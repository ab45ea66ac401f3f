"""The gradients of a process that has some stages of a model, computed in the order of a pipeline schedule."""

import contextlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, RecordingCollectives, current
from tfdist.errors import InputError, count_of
from tfdist.gradients import unscale
from tfdist.pipelining.cutting import StageGraph
from tfdist.pipelining.execution import NO_CLOCK, ActionClock, Execution
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.passes import Forward, Gradient
from tfdist.pipelining.spread_stage import SpreadStage
from tfdist.pipelining.stage_costs import crossing_specs
from tfdist.pipelining.stage_parts import sum_over_stages
from tfdist.pipelining.staged_model import StagedModel
from tfdist.step import loss, randomness
from tfdist.step.gradient_source import GradientSource, LocalGradients, to_dense
from tfdist.step.layer_state import feedback_variables
from tfdist.step.metrics import LossShare, weight_scalars
from tfdist.step.reduction import ComputeResult, square_norms


class MicroBatch(NamedTuple):
    """The arguments of the forward pass of a stage for a micro-batch."""

    rows: Any  # (x, y) or (x, y, sample_weight)
    number: tf.Tensor  # scalar; index of the micro-batch in the step
    step: tf.Tensor  # scalar int64; number of previous updates
    replica: tf.Tensor | int  # rank of the replica
    totals: list[tf.Tensor]  # denominators of the losses; empty in stages other than the last
    batch_size: int | tf.Tensor  # number of rows of the global batch


class PipelinedGradients(GradientSource):
    """Computes the gradients of this process's stages in micro-batches. The loss and the gradient norm cover all stages."""

    model: StagedModel
    strategy: HasStages
    messages: RecordingCollectives
    has_local_time = False

    def __init__(self, *args: Any, clock: ActionClock = NO_CLOCK):
        super().__init__(*args)
        self.clock = clock  # records when actions begin and end
        self.keeps_gradients = self.strategy.replicas == 1
        self.messages = RecordingCollectives(self.strategy.pipeline_collectives)
        full_model = self.model.full_model
        self.seeds = randomness.seed_states(full_model)  # layers of different stages must draw different numbers
        state = [*keras_internals.user_layer_state(full_model), *keras_internals.spectral_norm_variables(full_model)]
        self._layer_state = {id(variable) for variable in state}
        first_stages = {id(variable): min(stages) for variable, stages in self.model.cut.shared}
        local_stages = self.model.stages
        self._is_shared = [id(variable) in first_stages for variable in self.variables]
        self._is_first = [first_stages.get(id(v), min(local_stages)) in local_stages for v in self.variables]

    def begin(self) -> None:
        """Begins a trace."""
        self.messages = RecordingCollectives(self.strategy.pipeline_collectives)

    def _row_gradients(
        self, batch: Any, batch_size: int | tf.Tensor, step: tf.Tensor, collectives: Collectives
    ) -> LocalGradients:
        """See base class. The returned loss is the share of this process's stages."""
        self.begin()
        strategy = self.strategy
        totals = self.totals(batch, batch_size) if strategy.is_last else []
        parts = split_rows(batch, strategy.micro_batches)
        micro_batches = [
            MicroBatch(rows, tf.constant(number), step, strategy.collectives.rank, totals, batch_size)
            for number, rows in enumerate(parts)
        ]
        stages = {number: _Stage(self, graph, micro_batches) for number, graph in self.model.stages.items()}
        process, compression = strategy.pipeline_rank, strategy.activation_compression
        sums = Execution(strategy.schedule, process, stages, self.messages, self.clock, compression).run()
        gradients_by_id: dict[int, Gradient] = {}
        for number, stage in stages.items():
            stage_gradients = stage.gradients_of(sums.gradients[number])
            for variable, gradient in zip(stage.trainable_variables, stage_gradients, strict=True):
                previous = gradients_by_id.get(id(variable))
                total = gradient if previous is None else previous if gradient is None else previous + gradient
                gradients_by_id[id(variable)] = total
        gradients = [gradients_by_id[id(variable)] for variable in self.variables]
        unused_indices = (i for i, g in enumerate(gradients) if g is None and not self._is_shared[i])
        self.unused_indices.append(frozenset(unused_indices))
        tensors = [to_dense(gradient, variable) for gradient, variable in zip(gradients, self.variables, strict=True)]
        return LocalGradients(tensors, sums.share)

    def totals(self, batch: Any, batch_size: int | tf.Tensor) -> list[tf.Tensor]:
        """Returns the denominators of the losses, which the first backward pass needs.

        They depend on the data only through masks and weights. Masks are computed by a forward pass of the whole model, in
        which the weights of other processes are zeros. Only operations for masks and side effects such as `tf.py_function`
        are run. Without masks, there is no such pass.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        unmasked_outputs = self.model.cut.unmasked_outputs(tf.shape(keras.tree.flatten(x)[0])[0])
        if unmasked_outputs is not None:
            return loss.totals(loss.terms(self.model, y, unmasked_outputs, weight), batch_size, current())
        outputs, placeholders = self.model.call_with_zero_weights(x, training=False)
        terms = loss.terms(self.model, y, outputs, weight)
        zeros = {id(value) for value in placeholders}
        for term in terms:
            if term.per_row is None and keras_internals.is_computed_from(term.denominator, zeros):
                raise InputError(
                    "The masks of a pipeline's outputs must depend only on its inputs, because they are needed before the "
                    "first backward pass. Received: a mask that depends on weights. Compute the mask from an input, or use "
                    "another --strategy."
                )
        return loss.totals(terms, batch_size, current())

    def agree(self, result: ComputeResult, with_gradient_norm: tf.Tensor) -> ComputeResult:
        """See base class. Sends one message. The first stage of a shared variable adds its gradient to the norm.

        Gradients of shared variables are summed over their stages here, after the reduction over replicas: the messages of
        two stages contain different tensors, and an engine's sums may depend on them.
        """
        floatx, value = keras.config.floatx(), result.loss
        gradients = sum_over_stages(result.gradients, self.variables, self.model.cut, self.strategy, self.messages)
        squares = square_norms(list(itertools.compress(gradients, self._is_first)))
        has_failed = tf.cast(tf.logical_not(result.finite), floatx)
        local_values = tf.stack([tf.cast(value, floatx), has_failed, tf.add_n([tf.zeros([], floatx), *squares])])
        [all_values] = self.strategy.pipeline_collectives.all_gather([local_values[None]], name="stages/agreed")
        total, has_failed, norm = tf.unstack(tf.reduce_sum(all_values, axis=0))
        total, finite = tf.cast(total, value.dtype), tf.equal(has_failed, 0)
        return result._replace(gradients=gradients, loss=total, finite=finite, norm=tf.sqrt(norm))

    def forward(
        self,
        graph: StageGraph | SpreadStage,
        micro_batch: MicroBatch,
        received: Sequence[tf.Tensor],
        values: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Sequence[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns the tensors that a stage sends for a micro-batch, and its shares of the differentiated and recorded loss.

        The two losses are the same tensor if they are equal. The last stage updates metrics. `received` are the tensors
        from the previous stage, and `values` is a context in which variables have other values.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(micro_batch.rows)
        batch_size = micro_batch.batch_size
        rows = tf.shape(keras.tree.flatten(x)[0])[0]
        share = loss.to_floatx(rows) / loss.to_floatx(batch_size)
        operations = keras_internals.count_operations()
        with values or contextlib.nullcontext(), weight_scalars(share), self._random_scope(micro_batch):
            outputs, sent = graph.call(self.model.cut.named_inputs(x), received, training=True)
            layer_losses = graph.take_data_losses(), graph.weight_losses()
        self._check_state(graph, (outputs, sent, layer_losses), operations)
        terms = loss.terms(self.model, y, outputs, weight) if graph.is_last else []
        totals = micro_batch.totals if terms else []
        value, recorded_value, shares = loss.training_losses(layer_losses, terms, totals, rows, batch_size, _sum)
        if graph.is_last:
            self.metrics.update(y, outputs, weight, LossShare(recorded_value, shares, rows, batch_size))
        return sent, value, recorded_value

    def _check_state(self, graph: StageGraph | SpreadStage, results: Any, operations: int) -> None:
        """Raises `InputError` if the forward pass, which returned `results`, assigns state that later micro-batches read."""
        parts = self.strategy.replicas * self.strategy.micro_batches
        variables = [] if parts == 1 or isinstance(graph, SpreadStage) else graph.variables.all
        state = [variable for variable in variables if id(variable) in self._layer_state]
        if feedback := feedback_variables(state, results, operations):
            raise InputError(
                "Layers of a pipeline must not compute with state that they assign in training, because one device would "
                f"assign it once per step. Received: {feedback[0].path}, with "
                f"{count_of(self.strategy.micro_batches, 'micro-batch')} and {count_of(self.strategy.replicas, 'replica')}. "
                "Use another --strategy."
            )

    def _random_scope(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Returns the context of random operations outside of the model's generators."""
        if self.strategy.replicas * self.strategy.micro_batches == 1:
            return contextlib.nullcontext()
        position = micro_batch.step, micro_batch.replica, micro_batch.number
        return randomness.micro_batch_random_scope(self.seeds, self.settings.seed, *position)


class _Stage:
    """A stage in one step; see `tfdist.pipelining.execution.StepStage`."""

    def __init__(
        self, source: PipelinedGradients, graph: StageGraph | SpreadStage, micro_batches: Sequence[MicroBatch]
    ):
        self._source, self._graph, self._micro_batches = source, graph, micro_batches
        self.trainable_variables = graph.variables.trainable
        devices = source.strategy.stage_devices
        self.variables = [v.value for v in self.trainable_variables] if devices is None else [devices.order]
        rows = keras.tree.flatten(micro_batches[0].rows)[0].shape[0]
        self.received, self.sent = crossing_specs(graph.received, rows), crossing_specs(graph.sent, rows)

    def arguments(self, micro_batch: int) -> MicroBatch:
        return self._micro_batches[micro_batch]

    def forward(self, arguments: MicroBatch, received: Sequence[tf.Tensor]) -> Forward:
        sent, value, recorded_loss = self._source.forward(self._graph, arguments, received)
        self._scale = self._source.loss_scale
        return Forward(sent, value if self._scale is None else value * tf.cast(self._scale, value.dtype), recorded_loss)

    def gradients(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[Gradient]:
        tensors = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        return tensors if isinstance(self._graph, SpreadStage) else _unscale(tensors, self._scale)

    def gradients_of(self, sums: Sequence[Gradient]) -> Sequence[Gradient]:
        """Returns the gradients of `trainable_variables`, given the summed results of the backward passes."""
        if not isinstance(self._graph, SpreadStage):
            return sums
        [last_sum] = sums
        gradients = self._graph.pop_gradients(tf.zeros([]) if last_sum is None else last_sum)
        return _unscale(gradients, self._source.loss_scale)


def _sum(shares: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sums shares of losses in floatx; returns 0 if there are none."""
    floatx = keras.config.floatx()
    return tf.add_n([tf.zeros([], floatx), *(tf.cast(share, floatx) for share in shares)])


def _unscale(gradients: list[Gradient], scale: tf.Tensor | None) -> list[Gradient]:
    return gradients if scale is None else [None if g is None else unscale(g, scale) for g in gradients]


def split_rows(batch: Any, micro_batches: int) -> list[Any]:
    """Returns the micro-batches of a replica's rows."""
    first_leaf = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    rows = first_leaf.shape[0]
    if rows is None or rows % micro_batches:
        raise InputError(
            f"The rows of each replica must be divisible into micro-batches of equal size. Received: {rows} rows and "
            f"--micro_batches={micro_batches}. Choose a --batch_size that is divisible by replicas times micro-batches."
        )
    slices = [slice(start, start + rows // micro_batches) for start in range(0, rows, rows // micro_batches)]
    return [tf.nest.map_structure(operator.itemgetter(part), batch) for part in slices]
