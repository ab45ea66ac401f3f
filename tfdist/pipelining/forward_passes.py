"""The forward pass of the full model through a pipeline, for evaluation and prediction."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.pipelining.activation_compression import Link
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.output_tensors import OutputTensors
from tfdist.pipelining.stage_costs import crossing_specs, with_static_shapes
from tfdist.pipelining.staged_model import StagedModel

_ROWS = 32  # of a micro-batch, if the number of rows is unknown while tracing


def forward(strategy: HasStages, model: StagedModel, inputs: Any) -> Any:
    """Returns the outputs of a model, in a replica function; in processes without the last stage, zeros of their shapes.

    The rows flow through the stages as micro-batches of equal size. A stage computes a micro-batch while the stages after it
    compute earlier ones. The last micro-batch is filled with copies of the last row; if layers add losses, in which the
    copies would count, the remaining rows flow in micro-batches of one row instead.

    Losses that layers of this process add are added to the model, as means over the rows.

    Args:
      strategy: the strategy.
      model: this process's part of the model.
      inputs: inputs of the model, with any number of rows.
    """
    first = keras.tree.flatten(inputs)[0]
    rows = tf.shape(first)[0]
    size = _ROWS if first.shape[0] is None else max(1, -(-first.shape[0] // strategy.micro_batches))
    if not model.cut.run.adds_losses:
        count = -(-rows // size)
        padded = keras.tree.map_structure(lambda x: _padded(x, count * size), inputs)
        return _forward(strategy, model, padded, rows, [_Part(tf.constant(0), count, size)])
    full = rows // size
    parts = [_Part(tf.constant(0), full, size), _Part(full * size, rows - full * size, 1)]
    return _forward(strategy, model, inputs, rows, parts)


class _Part(NamedTuple):
    """Rows that flow in micro-batches of one size.

    Attributes:
      start: scalar; the first row.
      count: scalar; number of micro-batches.
      size: rows of each.
    """

    start: tf.Tensor
    count: tf.Tensor
    size: int


def _forward(strategy: HasStages, model: StagedModel, inputs: Any, rows: tf.Tensor, parts: Sequence[_Part]) -> Any:
    outputs = _Outputs(model, inputs)
    outputs_by_part, losses = [], tf.zeros([], keras.config.floatx())
    for part in parts:
        arrays, part_losses = _micro_batches(strategy, model, inputs, part, outputs)
        outputs_by_part.append([array.concat() for array in arrays])
        losses += part_losses
    if model.cut.run.adds_losses:
        model.add_loss(tf.math.divide_no_nan(losses, tf.cast(rows, losses.dtype)))
    joined = [tf.concat(pieces, axis=0)[:rows] for pieces in zip(*outputs_by_part, strict=True)]
    return outputs.packed(joined or outputs.zeros(rows))


def _micro_batches(
    strategy: HasStages, model: StagedModel, inputs: Any, part: _Part, outputs: "_Outputs"
) -> tuple[list[tf.TensorArray], tf.Tensor]:
    """Returns the outputs of a part's micro-batches, and the sum over its rows of losses of layers of this process."""
    start, count, size = part
    specs = outputs.specs(size) if strategy.is_last else []
    arrays = [tf.TensorArray(spec.dtype, size=count, element_shape=spec.shape) for spec in specs]

    def body(number: tf.Tensor, arrays: list[tf.TensorArray], losses: tf.Tensor) -> Any:
        micro_batch = keras.tree.map_structure(lambda x: _rows(x, start + number * size, size), inputs)
        results, own_losses = _micro_batch(strategy, model, micro_batch, size)
        arrays = [array.write(number, x) for array, x in zip(arrays, outputs.tensors(results), strict=True)]
        return number + 1, arrays, losses + size * tf.add_n([tf.zeros_like(losses), *own_losses])

    _, arrays, losses = tf.while_loop(
        lambda number, *_: number < count,
        body,
        (tf.constant(0), arrays, tf.zeros([], keras.config.floatx())),
        parallel_iterations=1,
    )
    return arrays, losses


def _padded(x: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Repeats the last row, which layers accept, unlike zeros or empty strings, which they may refuse."""
    return tf.gather(x, tf.minimum(tf.range(rows), tf.maximum(tf.shape(x)[0] - 1, 0)))


def _rows(x: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    return tf.ensure_shape(x[start : start + size], [size, *x.shape[1:]])


def _micro_batch(strategy: HasStages, model: StagedModel, inputs: Any, rows: int) -> tuple[Any, list[tf.Tensor]]:
    """Computes the stages of this process.

    Returns:
      The model's outputs if this process has the last stage, else None.
      Losses of its layers, as means over the rows.
    """
    local: list[tf.Tensor] = []  # between two stages of this process
    outputs, losses = None, []
    for number, stage in model.stages.items():
        before, after = (strategy.schedule.process_of(number + step) for step in (-1, 1))
        received = local
        if before != strategy.pipeline_rank and stage.received:
            specs = [crossing.spec for crossing in crossing_specs(stage.received, rows)]
            received = Link(strategy.pipeline_collectives, before).receive(specs, f"forward/{rows}/{number}")
        outputs, local = stage.call(model.cut.named_inputs(inputs), received, training=False)
        losses += [tf.cast(tf.reduce_sum(loss), keras.config.floatx()) for loss in stage.take_data_losses()]
        if after != strategy.pipeline_rank and stage.sent:
            local = with_static_shapes(local, crossing_specs(stage.sent, rows))
            Link(strategy.pipeline_collectives, after).send(local, f"forward/{rows}/{number + 1}")
    return outputs, losses


class _Outputs(OutputTensors):
    """The outputs of a model, whose shapes are known without computing them."""

    def __init__(self, model: StagedModel, inputs: Any):
        """Traces the model without computing anything.

        Args:
          model: the model.
          inputs: inputs of the model.
        """
        with keras_internals.new_trace().as_default():
            placeholders = keras.tree.map_structure(
                lambda x: tf.compat.v1.placeholder(x.dtype, [1, *x.shape[1:]]), inputs
            )
            outputs, _ = model.with_zeros(placeholders, training=False)
            super().__init__(outputs)
            self._of_one_row = [tf.TensorSpec(x.shape, x.dtype) for x in self.tensors(outputs)]

    def specs(self, rows: int) -> list[tf.TensorSpec]:
        """Returns the shapes and dtypes of the outputs for a number of rows."""
        return [tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype) for spec in self._of_one_row]

    def zeros(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns zeros of the shapes of the outputs for a number of rows."""
        return [tf.zeros([rows, *spec.shape[1:]], spec.dtype) for spec in self._of_one_row]
